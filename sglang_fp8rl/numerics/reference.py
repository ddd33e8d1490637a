"""The definition of the cast, in plain PyTorch. Every other backend must give these bytes.

`w ≈ q · weight_scale_inv`. Per block:

1. `x_bf16 = bf16(x)`, round to nearest even, whatever the source: the trainer's forward pass sees
   BF16 weights.
2. `weight_scale_inv = max(amax / 448, smallest normal FP32)`; 1 for an all-zero block; optionally
   rounded *up* to a power of two.
3. `q = e4m3fn(clamp(x_bf16 / weight_scale_inv, -448, 448))`: IEEE division by the *stored* scale,
   round to nearest even, saturating.

The block format is DeepSeek-V3's (arXiv:2412.19437, section 3.3.2); 448 is the largest e4m3fn.
Nothing here is fast, and nothing here holds more than a few blocks of rows beside the result.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import QuantizationError
from .cast import FP8_DTYPE
from .grid import Blockwise, PerChannel, ScaleGranularity, ceil_div
from .quantize import Quantized, quantize

FP8_MAX = 448.0
SMALLEST_NORMAL_FP32 = torch.finfo(torch.float32).tiny

# Rows in flight where no block says how many: bounds the temporaries of a large matrix.
ROWS_AT_ONCE = 128

BlockSize = tuple[int, int]


def quantize_blockwise(
    weight: torch.Tensor, block_size: BlockSize = (128, 128), **options: Any
) -> Quantized:
    """As `numerics.quantize_blockwise`, with this definition."""
    return quantize(weight, Blockwise.of(block_size), backend="reference", **options)


def quantize_per_channel(weight: torch.Tensor, **options: Any) -> Quantized:
    """As `numerics.quantize_per_channel`, with this definition."""
    return quantize(weight, PerChannel(), backend="reference", **options)


def dequantize(
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    block_size: BlockSize = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`q · scale` in FP32, then one cast to `dtype`; [N, K].

    The shape of `weight_scale` says what it is: [ceil(N / block_n), ceil(K / block_k)] is blockwise,
    [N, 1] or [N] is per channel. A shape that fits both (N = 1, or block_n = 1 and K <= block_k)
    means the same either way.

    Raises:
        QuantizationError: `qweight` is no e4m3fn matrix, or the scales fit neither reading.
    """
    if qweight.dtype != FP8_DTYPE or qweight.dim() != 2:
        raise QuantizationError(
            "qweight",
            f"{qweight.dtype} {list(qweight.shape)}",
            f"codes are a matrix of {FP8_DTYPE}",
            "Pass the stored weight of one module or expert",
        )
    grid = Blockwise.of(block_size).grid(qweight.shape)
    (rows, cols), (block_n, block_k) = grid.shape, grid.block
    if tuple(weight_scale.shape) == grid.scale_shape:
        scale = weight_scale.float()
        scale = scale.repeat_interleave(block_n, 0)[:rows].repeat_interleave(block_k, 1)[:, :cols]
    elif tuple(weight_scale.shape) in ((rows, 1), (rows,)):
        scale = weight_scale.float().reshape(rows, 1)
    else:
        raise QuantizationError(
            "weight_scale",
            f"shape {list(weight_scale.shape)} for codes {list(qweight.shape)}",
            f"scales are {list(grid.scale_shape)} (blocks {list(grid.block)})"
            f" or {[rows, 1]} (per channel)",
            "Pass the scales that were written with these codes, and their block size",
        )
    return (qweight.float() * scale).to(dtype)


def cast_into(
    source: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    granularity: ScaleGranularity,
    pow2_scale: bool,
    round_to_bf16: bool,
) -> torch.Tensor:
    """Cast a checked source into codes [N, K] and scales of the granularity's shape, in place.

    Returns bool of that shape: True where a block is not finite; its old bytes stay. Never waits for a GPU.
    """
    cols = source.shape[1]
    block_n, block_k = granularity.block(source.shape)
    is_per_channel = isinstance(granularity, PerChannel)
    step = ROWS_AT_ONCE if is_per_channel else block_n
    nonfinite = torch.empty(weight_scale.shape, dtype=torch.bool, device=source.device)
    # FP8 has no `where`; bytes do.
    out = qweight.detach().view(torch.uint8)
    source, scales = source.detach(), weight_scale.detach()
    for start in range(0, source.shape[0], step):
        rows = slice(start, start + step)
        if is_per_channel:
            blocks = rows
            codes, scale, bad = quantize_channels(source[rows], pow2_scale, round_to_bf16)
            scale, bad = scale[:, None], bad[:, None]  # [n, 1]
            keep = bad
        else:
            blocks = slice(start // block_n, start // block_n + 1)
            codes, scale, bad = quantize_block_row(source[rows], block_k, pow2_scale, round_to_bf16)
            keep = bad.repeat_interleave(block_k)[:cols]  # [K]
        out[rows] = torch.where(keep, out[rows], codes.view(torch.uint8))
        scales[blocks] = torch.where(bad, scales[blocks], scale)
        nonfinite[blocks] = bad
    return nonfinite


def through_fp8_into(
    source: torch.Tensor,
    out: torch.Tensor,
    granularity: ScaleGranularity,
    pow2_scale: bool,
    round_to_bf16: bool,
) -> None:
    """Write what a server computes with into `out` [N, K] BF16: cast, and back.

    A block that is not finite comes out as BF16 has it.
    """
    cols = source.shape[1]
    block_n, block_k = granularity.block(source.shape)
    step = ceil_div(ROWS_AT_ONCE, block_n) * block_n
    for start in range(0, source.shape[0], step):
        rows = source[start : start + step].detach()
        grid = granularity.grid(rows.shape)
        codes = torch.empty(rows.shape, dtype=FP8_DTYPE, device=rows.device)
        scale = torch.empty(grid.scale_shape, dtype=torch.float32, device=rows.device)
        bad = cast_into(rows, codes, scale, granularity, pow2_scale, round_to_bf16)
        bad = bad.repeat_interleave(block_n, 0)[: rows.shape[0]]
        bad = bad.repeat_interleave(block_k, 1)[:, :cols]
        served = dequantize(codes, scale, grid.block)
        out[start : start + step] = torch.where(bad, rows.to(torch.bfloat16), served)


def quantize_block_row(
    rows: torch.Tensor, block_k: int, pow2_scale: bool, round_to_bf16: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row of blocks: `rows` [n <= block_n, K] in, codes [n, K] e4m3fn, scales [ceil(K /
    block_k)] FP32 and not-finite flags [ceil(K / block_k)] out; no device sync.

    Codes and scale of a flagged block mean nothing. Overflow of the BF16 step (|x| >= 3.3962e38)
    counts as not finite.
    """
    cols = rows.shape[1]
    blocks = ceil_div(cols, block_k)
    x = _widen(rows, round_to_bf16)  # [n, K]
    # amax over the rows first, so that only this vector is padded, never the weight.
    amax = x.abs().amax(0)  # [K], NaN survives
    amax = torch.nn.functional.pad(amax, (0, blocks * block_k - cols))
    amax = amax.view(blocks, block_k).amax(1)  # [blocks]
    scale_inv = amax_to_scale_inv(amax, pow2_scale)
    per_column = scale_inv.repeat_interleave(block_k)[:cols]  # [K]
    return _encode(x, per_column), scale_inv, ~amax.isfinite()


def quantize_channels(
    rows: torch.Tensor, pow2_scale: bool, round_to_bf16: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [n, K] in, codes [n, K], one scale and one flag per row [n] out; else as above."""
    x = _widen(rows, round_to_bf16)  # [n, K]
    amax = x.abs().amax(1)  # [n]
    scale = amax_to_scale_inv(amax, pow2_scale)
    return _encode(x, scale[:, None]), scale, ~amax.isfinite()


def _widen(x: torch.Tensor, round_to_bf16: bool) -> torch.Tensor:
    return x.to(torch.bfloat16).float() if round_to_bf16 else x.float()


def _encode(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)


def amax_to_scale_inv(amax: torch.Tensor, pow2_scale: bool) -> torch.Tensor:
    """FP32 `amax` >= 0 to the stored scale, same shape."""
    scale_inv = (amax / FP8_MAX).clamp(min=SMALLEST_NORMAL_FP32)
    scale_inv = torch.where(amax == 0, torch.ones_like(scale_inv), scale_inv)
    return round_up_to_pow2(scale_inv) if pow2_scale else scale_inv


def round_up_to_pow2(value: torch.Tensor) -> torch.Tensor:
    """The smallest power of two >= `value` (FP32, positive, normal), exactly.

    Integer arithmetic on the bits, because log2 and exp2 are rounded: any mantissa bit carries
    into the exponent, then the mantissa is cleared. A power of two stays.
    """
    bits = value.view(torch.int32)
    return ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)
