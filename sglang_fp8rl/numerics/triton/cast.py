"""The casts of one tensor on a GPU: to codes as a table of one piece, and through FP8 and back.

The latter is one program per 128×128 block, or per row; read once, written once. Other blocks, which no server
has, are PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .. import reference
from ..write_table import CastTable, Piece
from .arithmetic import (
    BF16,
    FP32,
    amax_to_scale_inv,
    fp32_bits,
    largest_magnitude,
    round_bits_to_bf16,
)
from .hardware import BLOCK, on_device, row_warps, tile_options
from .table import TritonTable


@triton.jit
def served_bits(x, scale, finite, KIND: tl.constexpr, ROUND: tl.constexpr):
    """BF16 bits of what source bits are served as; of a block that is not finite, of the source."""
    bits = fp32_bits(x, KIND)
    cast = round_bits_to_bf16(bits) if ROUND else bits
    y = tl.math.div_rn(cast.to(tl.float32, bitcast=True), scale).to(tl.int32, bitcast=True)
    a = tl.minimum(y & 0x7FFFFFFF, 0x43E00000)  # 448.0
    # Adding this and taking it off again leaves no bit below the e4m3 ulp, as in `encode_e4m3`.
    lift = tl.maximum(a & 0x7F800000, 0x3C800000) + (20 << 23)
    lifted = a.to(tl.float32, bitcast=True) + lift.to(tl.float32, bitcast=True)
    product = (lifted - lift.to(tl.float32, bitcast=True)) * scale
    served = round_bits_to_bf16(product.to(tl.int32, bitcast=True)) | (bits & -2147483648)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    as_it_is = tl.where(is_nan, bits | 0x00400000, round_bits_to_bf16(bits))
    return (tl.where(finite, served, as_it_is) >> 16).to(tl.int16)


@triton.jit(do_not_specialize=["rows", "cols"])
def through_kernel(
    source,
    out,
    rows,
    cols,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    POW2: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One block of a contiguous matrix per program, columns fastest: 128×128, or a row in one of that width."""
    pid = tl.program_id(0)
    blocks_k = tl.cdiv(cols, WIDTH).to(tl.int32)
    n = pid // blocks_k * HEIGHT + tl.arange(0, HEIGHT)
    k = pid % blocks_k * WIDTH + tl.arange(0, WIDTH)
    where = n.to(tl.int64)[:, None] * cols + k[None, :]
    inside = (n < rows)[:, None] & (k < cols)[None, :]
    x = tl.load(source + where, mask=inside, other=0)
    scale, finite = amax_to_scale_inv(largest_magnitude(x, KIND), POW2, ROUND)
    tl.store(out + where, served_bits(x, scale, finite, KIND, ROUND), mask=inside)


def cast_into(
    source: torch.Tensor,
    target: torch.Tensor,
    weight_scale: torch.Tensor,
    nonfinite: torch.Tensor,
    block: tuple[int, int],
    pow2_scale: bool,
    round_to_bf16: bool,
) -> None:
    """As `reference.cast_into`, for FP32 and BF16 in contiguous rows; a NaN in BF16 may have other bits.

    A BF16 target gets neither scales nor flags.
    """
    is_row = block == (1, source.shape[1])
    if block != (BLOCK, BLOCK) and not is_row:
        outs = (target, weight_scale, nonfinite)
        reference.cast_into(source, *outs, block, pow2_scale, round_to_bf16)
    elif target.dtype == torch.bfloat16:
        _through(source, target, is_row, {"POW2": bool(pow2_scale), "ROUND": bool(round_to_bf16)})
    else:
        table = CastTable.of([Piece((0, 0), source, target, weight_scale, block)])
        rounding = {"pow2_scale": pow2_scale, "round_to_bf16": round_to_bf16}
        flags = TritonTable(table, source.device, **rounding).start([source.data_ptr()])
        nonfinite.view(torch.int8).copy_(flags.view(nonfinite.shape))


def _through(
    source: torch.Tensor, out: torch.Tensor, is_row: bool, rounding: dict[str, Any]
) -> None:
    """One launch and no copy from the host, so that a CUDA graph may capture it."""
    rows, cols = source.shape
    height, width, options = BLOCK, BLOCK, tile_options(1)
    if is_row:
        height, width = 1, max(16, triton.next_power_of_2(cols))
        options = {"num_warps": row_warps(width)}
    is_wide = source.dtype == torch.float32
    with on_device(source.device):
        through_kernel[(triton.cdiv(rows, height) * triton.cdiv(cols, width),)](
            source.contiguous().view(torch.int32 if is_wide else torch.int16),
            out.view(torch.int16),
            rows,
            cols,
            HEIGHT=height,
            WIDTH=width,
            KIND=(FP32 if is_wide else BF16).value,
            **rounding,
            **options,
        )
