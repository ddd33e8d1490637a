"""The public casts as plain torch does them: what other ways of casting are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_fp8rl.numerics import quantize

Quantized = tuple[torch.Tensor, torch.Tensor]


def quantize_blockwise(
    weight: torch.Tensor, block_size: Sequence[int] = (128, 128), **options: Any
) -> Quantized:
    return quantize(weight, block_size, backend="reference", **options)


def quantize_per_channel(weight: torch.Tensor, **options: Any) -> Quantized:
    return quantize(weight, (1, None), backend="reference", **options)
