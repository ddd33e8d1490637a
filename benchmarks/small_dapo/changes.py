"""How much of the served FP8 weights a training step changes: what a delta refit would have to send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

BLOCK = 128


@dataclass(frozen=True)
class Changed:
    """Fractions of all FP8 weights.

    Attributes:
        codes: e4m3 codes that are not what they were.
        blocks: 128×128 blocks with such a code, or with another scale.
    """

    codes: float
    blocks: float


def changed(before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> Changed:
    """Compare two sets of what `quantize_for_refit` yields, blockwise, under the same names."""
    codes = blocks = all_codes = all_blocks = 0
    for name, code in now.items():
        if code.dtype != torch.float8_e4m3fn:
            continue
        differs = code.view(torch.uint8) != before[name].view(torch.uint8)  # [N, K]
        scale = f"{name}_scale_inv"
        moved = now[scale] != before[scale]  # [N / 128, K / 128]
        touched = moved | _any_in_block(differs)
        codes += int(differs.sum())
        blocks += int(touched.sum())
        all_codes += differs.numel()
        all_blocks += touched.numel()
    return Changed(codes / all_codes, blocks / all_blocks)


def _any_in_block(differs: torch.Tensor) -> torch.Tensor:
    rows, columns = differs.shape
    padded = torch.nn.functional.pad(differs, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    return tiles.any(dim=3).any(dim=1)
