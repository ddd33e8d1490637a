"""How changed blocks of one weight travel: one uint8 tensor, `NAME.fp8rl_delta`.

| bytes | what |
|---|---|
| 8 | `b"fp8rl-d1"` |
| 8 | number of changed blocks `n`, int64 |
| 8 × blocks | digest of every block of the *resulting* weight, int64, row by row |
| 4 × n | which blocks, int32, row by row |
| 4 × n | their scales, FP32 |
| n × block | their codes, e4m3fn; zero where a block is shorter |

One tensor, so that no bucket boundary can part what belongs together. Torch only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import RefitError

DELTA_SUFFIX = ".fp8rl_delta"
FULL_REFIT_WANTED = "a full refit is asked for"
_MAGIC = int.from_bytes(b"fp8rl-d1", "little")
_HEADER = 16


@dataclass(frozen=True)
class Delta:
    """Changed blocks of one full, unsharded weight.

    Attributes:
        digests: int64 [row blocks, column blocks] of the resulting weight.
        index: int64 [n], which blocks, counted row by row.
        scale: FP32 [n].
        blocks: uint8 [n, block_n, block_k].
    """

    digests: torch.Tensor
    index: torch.Tensor
    scale: torch.Tensor
    blocks: torch.Tensor

    def pack(self) -> torch.Tensor:
        """One uint8 tensor, on the device of the parts."""
        header = torch.tensor([_MAGIC, len(self.index)], device=self.index.device)
        parts = (header, self.digests, self.index.to(torch.int32), self.scale, self.blocks)
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def packed_bytes(blocks: int, changed: int, block_size: tuple[int, int]) -> int:
    """What `Delta.pack` takes for `changed` of `blocks` blocks."""
    return _HEADER + 8 * blocks + changed * (8 + block_size[0] * block_size[1])


def unpack(
    name: str, packed: torch.Tensor, grid: tuple[int, int], block_size: tuple[int, int]
) -> Delta:
    """The reverse of `Delta.pack`, as views where their alignment allows.

    Args:
        name: of the weight, for errors.
        grid, block_size: of the weight.

    Raises:
        RefitError: it is no delta, or one of another shape.
    """
    blocks = grid[0] * grid[1]
    is_bytes = packed.dtype == torch.uint8 and packed.dim() == 1 and packed.numel() >= _HEADER
    magic, changed = packed[:_HEADER].clone().view(torch.int64).tolist() if is_bytes else (0, 0)
    expected = packed_bytes(blocks, changed, block_size)
    if magic != _MAGIC or not 0 <= changed <= blocks or packed.numel() != expected:
        raise RefitError(
            name + DELTA_SUFFIX,
            f"{packed.dtype} of shape {tuple(packed.shape)}, {changed} changed blocks",
            f"a delta of {grid[0]} × {grid[1]} blocks of {list(block_size)} takes {expected} bytes",
            "Make it with quantize_for_refit(..., since=...) and this server's plan.",
        )
    cuts = [_HEADER, 8 * blocks, 4 * changed, 4 * changed]
    cuts.append(packed.numel() - sum(cuts))
    _, digests, index, scale, codes = packed.split(cuts)
    delta = Delta(
        digests.clone().view(torch.int64).view(grid),
        index.clone().view(torch.int32).to(torch.int64),
        scale.clone().view(torch.float32),
        codes.view(changed, *block_size),
    )
    if changed and not (0 <= int(delta.index.min()) <= int(delta.index.max()) < blocks):
        raise RefitError(
            name + DELTA_SUFFIX,
            f"block {int(delta.index.max())}",
            f"the weight has {blocks} blocks",
            "Make it with this server's plan.",
        )
    return delta
