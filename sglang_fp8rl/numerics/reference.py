"""The definition of the cast, in plain PyTorch. Every other backend must give these bytes.

`w ≈ q · weight_scale_inv`. Per block:

1. `x_bf16 = bf16(x)`, round to nearest even, whatever the source: the trainer's forward pass sees
   BF16 weights.
2. `weight_scale_inv = max(amax / 448, smallest normal FP32)`; 1 for an all-zero block; optionally
   rounded *up* to a power of two.
3. `q = e4m3fn(clamp(x_bf16 / weight_scale_inv, -448, 448))`: IEEE division by the *stored* scale,
   round to nearest even, saturating.

The block format is DeepSeek-V3's (arXiv:2412.19437, section 3.3.2); 448 is the largest e4m3fn. Nothing
here is fast, and nothing holds more than a few blocks of rows beside the result.
"""

from __future__ import annotations

import torch

from ..errors import QuantizationError
from ..formats.format import BlockGrid, Pair

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0
# Of the source, about this much at a time: bounds the temporaries of a large matrix.
_ELEMENTS_AT_ONCE = 256 * 1024


def dequantize(
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    block_size: Pair = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`q · scale` in FP32, then one cast to `dtype`; [N, K].

    The shape of `weight_scale` says what it is: [ceil(N / block_n), ceil(K / block_k)] is blockwise,
    [N, 1] or [N] is per channel; one that fits both means the same either way. Raises `QuantizationError`
    if it is neither, or `qweight` no e4m3fn matrix.
    """
    if qweight.dtype != FP8_DTYPE or qweight.dim() != 2:
        raise QuantizationError(
            "qweight",
            f"{qweight.dtype} {list(qweight.shape)}",
            f"codes are a matrix of {FP8_DTYPE}",
            "Pass the stored weight of one module or expert",
        )
    rows = qweight.shape[0]
    grid, scale = BlockGrid.of(qweight.shape, block_size), weight_scale.float()
    if scale.shape == grid.scale_shape:
        scale = _spread(scale, grid)
    elif scale.shape in ((rows, 1), (rows,)):
        scale = scale.reshape(rows, 1)
    else:
        raise QuantizationError(
            "weight_scale",
            f"shape {list(scale.shape)} for codes {list(qweight.shape)}",
            f"scales are {list(grid.scale_shape)} (blocks {list(grid.block)})"
            f" or {[rows, 1]} (per channel)",
            "Pass the scales that were written with these codes, and their block size",
        )
    return (qweight.float() * scale).to(dtype)


def cast_into(
    source: torch.Tensor,
    target: torch.Tensor,
    weight_scale: torch.Tensor,
    nonfinite: torch.Tensor,
    block: Pair,
    pow2_scale: bool,
    round_to_bf16: bool,
) -> None:
    """Cast a checked source [N, K] in FP32, BF16 or FP16, in place. Never waits for a GPU.

    Args:
        target: [N, K] e4m3fn for codes, which stay where a block is not finite; or BF16 for what codes
            and scales stand for, and for the source where a block is not finite.
        weight_scale, nonfinite: FP32 and bool [ceil(N / block_n), ceil(K / block_k)]: scales, which stay
            likewise, and which blocks are not finite; those that overflow in the step to BF16 (|x| >= 3.3962e38) too.
    """
    for rows, blocks in BlockGrid.of(source.shape, block).strips(_ELEMENTS_AT_ONCE):
        x = source[rows].bfloat16().float() if round_to_bf16 else source[rows].float()
        grid = BlockGrid.of(x.shape, block)
        (n, cols), (block_n, block_k), (down, across) = grid.shape, block, grid.scale_shape
        padding = (0, across * block_k - cols, 0, down * block_n - n)  # zeros: no largest magnitude
        padded = torch.nn.functional.pad(x, padding).view(down, block_n, across, block_k)
        amax = padded.abs().amax((1, 3))  # NaN survives
        scale, bad = amax_to_scale_inv(amax, pow2_scale), ~amax.isfinite()
        codes = (x / _spread(scale, grid)).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
        is_kept = _spread(bad, grid)
        if target.dtype == FP8_DTYPE:  # FP8 has no `where`; bytes do
            out = target[rows].view(torch.uint8)
            out.copy_(torch.where(is_kept, out, codes.view(torch.uint8)))
        else:
            served = dequantize(codes, scale, block)
            target[rows] = torch.where(is_kept, source[rows].bfloat16(), served)
        weight_scale[blocks] = torch.where(bad, weight_scale[blocks], scale)
        nonfinite[blocks] = bad


def _spread(of_blocks: torch.Tensor, grid: BlockGrid) -> torch.Tensor:
    """What the values of a block share, for each of them: [ceil(N / block_n), ceil(K / block_k)] to [N, K]."""
    by_row = of_blocks.repeat_interleave(grid.block[0], 0)[: grid.shape[0]]
    return by_row.repeat_interleave(grid.block[1], 1)[:, : grid.shape[1]]


def amax_to_scale_inv(amax: torch.Tensor, pow2_scale: bool) -> torch.Tensor:
    """FP32 `amax` >= 0, with at least one dimension, to the stored scale, same shape."""
    # A GPU divides by a number of the host, and by a tensor without dimensions there, by multiplying with the
    # reciprocal: other scales.
    largest = amax.new_full((1,), FP8_MAX)
    scale_inv = (amax / largest).clamp(min=torch.finfo(torch.float32).tiny)
    scale_inv = torch.where(amax == 0, torch.ones_like(scale_inv), scale_inv)
    if not pow2_scale:
        return scale_inv
    # On the bits, because log2 and exp2 are rounded: any mantissa bit carries into the exponent, then the mantissa is
    # cleared. A power of two stays.
    bits = scale_inv.view(torch.int32)
    return ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)
