"""The kernels of `numerics.linear` as machine code, for a layer as it is served."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from sass import MachineCode, compile_kernel

from sglang_fp8rl.numerics.triton.linear import (
    doubled_kernel,
    doubled_tile,
    linear_kernel,
    tile_of,
)
from sglang_fp8rl.numerics.write_table import DTYPES

MULTIPROCESSORS = 132  # of an H100 and an H200
DOUBLED_LIMIT = 40  # instructions for each element
HOPPER_SHARED = 227 * 1024  # bytes for programs of one multiprocessor
_SIZES = ("m", "n", "k", "x_stride", "codes_stride", "scale_stride")


@dataclass(frozen=True)
class Tile:
    """Of one program: tokens, rows, columns that it takes at a time, and how many such are on their way."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int = 3

    @property
    def codes_per_thread(self) -> int:
        return self.rows * self.columns // (32 * self.warps)

    @property
    def bytes_of_x_per_thread(self) -> int:
        return 2 * self.tokens * self.columns // (32 * self.warps)


def tile_for(n: int) -> Tile:
    tile = tile_of(n)
    return Tile(tile["TOKENS"], tile["ROWS"], tile["COLUMNS"] * tile["PARTS"], tile["num_warps"])


@cache
def compiled(
    n: int, gpu: int, *, blockwise: bool = True, whole: bool = True, is_aligned: bool = True
) -> MachineCode:
    """For BF16 activations, and rows of a multiple of 16 columns or not."""
    tile = dict(tile_of(n, is_aligned=is_aligned))
    options = {name: tile.pop(name) for name in ("num_warps", "maxnreg") if name in tile}
    types = {"x": "*bf16", "codes": "*i8", "weight_scale": "*fp32"}
    types |= {"output": "*bf16", **dict.fromkeys(_SIZES, "i32")}
    return compile_kernel(
        linear_kernel,
        {"BLOCKWISE": blockwise, "WHOLE": whole, **tile},
        gpu,
        types=types,
        divisible=("n", "k", "x_stride", "codes_stride") if is_aligned else ("n",),
        **options,
    )


@cache
def compiled_doubled(
    group: int, gpu: int, *, dtype: torch.dtype = torch.bfloat16, pow2: bool = False
) -> tuple[MachineCode, int]:
    """For rows of a multiple of 16 columns; and how many elements a thread has."""
    tile = doubled_tile(group)
    warps = tile.pop("num_warps")
    types = {"x": "*i16", "out": "*i16", "m": "i32", "k": "i32", "x_stride": "i32"}
    code = compile_kernel(
        doubled_kernel,
        {"KIND": DTYPES[dtype], "POW2": pow2, **tile},
        gpu,
        types=types,
        divisible=("k", "x_stride"),
        num_warps=warps,
    )
    return code, tile["HEIGHT"] * tile["WIDTH"] // (32 * warps)
