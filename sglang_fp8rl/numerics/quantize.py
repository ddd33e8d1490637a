"""The public cast: a weight in, codes and scales out, on the backend that the engine uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import QuantizationError
from .backends import Backend
from .cast import cast_into, check_source
from .grid import Blockwise, PerChannel, ScaleGranularity
from .reference import FP8_DTYPE

Quantized = tuple[torch.Tensor, torch.Tensor]


def quantize(
    weight: torch.Tensor,
    granularity: ScaleGranularity,
    *,
    pow2_scale: bool = False,
    round_to_bf16: bool = True,
    name: str = "weight",
    backend: Backend = "auto",
) -> Quantized:
    """Quantize `weight` [N, K] (FP32, BF16 or FP16, any strides); the bytes of `reference.py`.

    Options are those of `cast_into`.

    Returns:
        `qweight` [N, K] e4m3fn, contiguous, and the FP32 scales of the granularity's shape, on the
        weight's device.

    Raises:
        QuantizationError: wrong dtype or rank; or a NaN or Inf: names the block. Asking for one
            waits for a GPU.
    """
    check_source(weight, name)
    grid = granularity.grid(weight.shape)
    qweight = torch.empty(weight.shape, dtype=FP8_DTYPE, device=weight.device)
    scale = torch.empty(grid.scale_shape, dtype=torch.float32, device=weight.device)
    nonfinite = cast_into(
        weight,
        qweight,
        scale,
        granularity,
        pow2_scale=pow2_scale,
        round_to_bf16=round_to_bf16,
        name=name,
        backend=backend,
    )
    if bool(nonfinite.any()):
        where = nonfinite.nonzero()
        i, j = where[0].tolist()
        rows, columns = (f"{part.start}:{part.stop}" for part in grid.values_of(i, j))
        raise QuantizationError(
            name,
            f"NaN or Inf in block ({i}, {j}), rows {rows}, columns {columns}"
            f" ({len(where)} of {nonfinite.numel()} blocks; BF16 overflows to Inf from 3.3962e38)",
            "a block that is not finite is never quantized",
            "Look at the step that produced this weight",
        )
    return qweight, scale


def quantize_blockwise(
    weight: torch.Tensor,
    block_size: Sequence[int] = (128, 128),
    *,
    pow2_scale: bool = False,
    round_to_bf16: bool = True,
    name: str = "weight",
) -> Quantized:
    """Quantize `weight` [N, K] block by block; the last block is smaller. Otherwise as `quantize`.

    Returns:
        `qweight` [N, K] e4m3fn and `weight_scale_inv` [ceil(N / block_n), ceil(K / block_k)] FP32.
    """
    rounding: Any = {"pow2_scale": pow2_scale, "round_to_bf16": round_to_bf16}
    return quantize(weight, Blockwise.of(block_size), name=name, **rounding)


def quantize_per_channel(
    weight: torch.Tensor,
    *,
    pow2_scale: bool = False,
    round_to_bf16: bool = True,
    name: str = "weight",
) -> Quantized:
    """Quantize `weight` [N, K] with one scale per row of this (local) shard; else as `quantize`.

    Returns:
        `qweight` [N, K] e4m3fn and `weight_scale` [N, 1] FP32, a multiplier like
        `weight_scale_inv`: both names are SGLang's.
    """
    rounding: Any = {"pow2_scale": pow2_scale, "round_to_bf16": round_to_bf16}
    return quantize(weight, PerChannel(), name=name, **rounding)
