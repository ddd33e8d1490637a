"""The kernel of `numerics.linear` as machine code, for a batch and a layer as they are served."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from sass import MachineCode, compile_kernel

from sglang_fp8rl.numerics.triton.linear import linear_kernel, tile_of

MULTIPROCESSORS = 132  # of an H100 and an H200
HOPPER_SHARED = 227 * 1024  # bytes for programs of one multiprocessor
_SIZES = ("m", "n", "k", "x_stride", "codes_stride", "scale_stride")


@dataclass(frozen=True)
class Tile:
    """Of one program: tokens, rows, columns that it takes at a time, and how many such are on their way."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int

    @property
    def codes_per_thread(self) -> int:
        return self.rows * self.columns // (32 * self.warps)

    @property
    def bytes_of_x_per_thread(self) -> int:
        return 2 * self.tokens * self.columns // (32 * self.warps)


def tile_for(m: int, n: int) -> Tile:
    tile = tile_of(m, n, MULTIPROCESSORS)
    columns = tile["COLUMNS"] * tile["PARTS"]
    return Tile(tile["TOKENS"], tile["ROWS"], columns, tile["num_warps"], tile["STAGES"])


@cache
def compiled(
    m: int, n: int, gpu: int, *, blockwise: bool = True, whole: bool = True, bias: bool = False
) -> MachineCode:
    """For BF16 activations, and rows of a multiple of 16 columns."""
    tile = dict(tile_of(m, n, MULTIPROCESSORS))
    constants: dict[str, Any] = {"BLOCKWISE": blockwise, "WHOLE": whole, "BIAS": bias}
    constants["PACKED"] = 2 if tile["PARTS"] == 1 and gpu == 90 else 4
    options = {"num_warps": tile.pop("num_warps")}
    types = {"x": "*bf16", "codes": "*i8", "weight_scale": "*fp32", "bias": "*bf16"}
    types |= {"output": "*bf16", **dict.fromkeys(_SIZES, "i32")}
    return compile_kernel(
        linear_kernel,
        constants | tile,
        gpu,
        types=types,
        divisible=("n", "k", "x_stride", "codes_stride"),
        **options,
    )
