"""The cast and back on a GPU: a block in registers, from memory to memory, of one matrix and no table.

`cast.through_fp8` has to give what codes times scales are, so the codes are made as `arithmetic.py` makes them
and are never stored: of two values in a word, the quotient by a reciprocal in two parts, the conversion to e4m3,
and back by way of FP16, which has every value of e4m3.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..grid import ceil_div
from ..write_table import DTYPES
from .arithmetic import (
    FP32,
    fp32_bits,
    has_packed_kernels,
    lifted_quotient,
    packed_bf16,
    reciprocal,
    round_bits_to_bf16,
    scale_of,
)
from .matrix import BLOCK, row_warps

_WIDEST = 8  # elements: 16 bytes of BF16
_TILE_WARPS, _SHORTEST = 8, 16  # columns of a row's program, at least
# From so many columns on, what lies in one block is further apart than 32 bits count.
_FAR = 2**24


@triton.jit
def packed_served(x, scale, finite):
    """As `served_bits` of BF16 bits, two at a time."""
    near, rest = reciprocal(scale)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, r;
        .reg .b16 codes, low, high;
        .reg .pred finite;
        shl.b32 a, $1, 16;
        and.b32 b, $1, 0xffff0000;
        mul.rn.f32 r, a, $4;
        fma.rn.f32 a, a, $2, r;
        mul.rn.f32 r, b, $4;
        fma.rn.f32 b, b, $2, r;
        cvt.rn.satfinite.e4m3x2.f32 codes, b, a;
        cvt.rn.f16x2.e4m3x2 r, codes;
        mov.b32 {low, high}, r;
        cvt.f32.f16 a, low;
        cvt.f32.f16 b, high;
        mul.rn.f32 a, a, $6;
        mul.rn.f32 b, b, $6;
        cvt.rn.bf16x2.f32 r, b, a;
        setp.ne.b32 finite, $8, 0;
        selp.b32 $0, r, $1, finite;
        }
        """,
        "=r,r,r,r,r,r,r,r,r,r",
        [x, near, rest, scale, finite.to(tl.int32)],
        dtype=tl.int16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def served_bits(x, scale, finite, KIND: tl.constexpr, ROUND: tl.constexpr):
    """BF16 bits of what source bits are served as; of a block that is not finite, of the source."""
    bits = fp32_bits(x, KIND)
    lifted, lift = lifted_quotient(round_bits_to_bf16(bits) if ROUND else bits, scale)
    product = (lifted - lift.to(tl.float32, bitcast=True)) * scale
    served = round_bits_to_bf16(product.to(tl.int32, bitcast=True)) | (bits & -2147483648)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    as_it_is = tl.where(is_nan, bits | 0x00400000, round_bits_to_bf16(bits))
    return (tl.where(finite, served, as_it_is) >> 16).to(tl.int16)


@triton.jit(do_not_specialize=["rows", "cols"])
def through_kernel(
    source, out, rows, cols, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, RAGGED: tl.constexpr, FAR: tl.constexpr,
    KIND: tl.constexpr, POW2: tl.constexpr, ROUND: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One block of a contiguous matrix per program, columns fastest: 128×128, or a row in one of that width.

    Args:
        ALIGN: elements that divide the columns and, up to 16 bytes, the source's address.
        RAGGED: the last blocks of a side may be smaller.
        FAR: offsets in a block need 64 bits.
    """
    blocks_k = tl.cdiv(cols, WIDTH).to(tl.int32)
    first_row = tl.program_id(0) // blocks_k * HEIGHT
    first_col = tl.program_id(0) % blocks_k * WIDTH
    cols = cols // ALIGN * ALIGN  # nothing else, but Triton sees it
    n, k = tl.arange(0, HEIGHT), tl.arange(0, WIDTH)
    if RAGGED:
        # Behind the last row it is read again, and written again with the same values: rows need no mask.
        n = tl.minimum(n, rows - first_row - 1)
    first = first_row.to(tl.int64) * cols + first_col
    where = (n.to(tl.int64) if FAR else n)[:, None] * cols + k[None, :]
    inside = (k < cols - first_col)[None, :]
    bytes: tl.constexpr = ALIGN * (4 if KIND == FP32 else 2)
    source = tl.multiple_of(source + first, bytes if bytes < 16 else 16)
    x = tl.load(source + where, mask=inside, other=0) if RAGGED else tl.load(source + where)
    if PACKED:
        x = packed_bf16(x, KIND)
    scale, finite = scale_of(x, KIND, POW2, ROUND, PACKED)
    if PACKED:
        served = packed_served(x, scale, finite)
    else:
        served = served_bits(x, scale, finite, KIND, ROUND)
    tl.store(out + first + where, served, mask=inside if RAGGED else None)


def tile_of(source: torch.Tensor, is_row: bool) -> dict[str, Any]:
    """Sizes and launch options of `through_kernel` for a contiguous matrix."""
    (rows, cols), address = source.shape, source.data_ptr()
    divides = cols | _WIDEST | (address // source.element_size() if address % 16 else 0)
    width = max(_SHORTEST, triton.next_power_of_2(cols))
    tile = {"HEIGHT": 1, "WIDTH": width, "num_warps": row_warps(width)}
    if not is_row:
        tile = {"HEIGHT": BLOCK, "WIDTH": BLOCK, "num_warps": _TILE_WARPS}
    is_ragged = bool(rows % tile["HEIGHT"] or cols % tile["WIDTH"])
    return {**tile, "ALIGN": divides & -divides, "RAGGED": is_ragged, "FAR": cols >= _FAR}


def through(
    source: torch.Tensor, out: torch.Tensor, is_row: bool, rounding: dict[str, bool]
) -> None:
    """One launch and no copy from the host, so that a CUDA graph may capture it.

    Args:
        source: FP32, BF16 or FP16, its blocks 128×128, or one row each (`is_row`).
        out: BF16, contiguous.
        rounding: `POW2` and `ROUND` of the kernels.
    """
    source = source.contiguous()
    tile, (rows, cols) = tile_of(source, is_row), source.shape
    programs = ceil_div(rows, tile["HEIGHT"]) * ceil_div(cols, tile["WIDTH"])
    with torch.cuda.device_of(source):  # on which Triton launches
        through_kernel[(programs,)](
            source.view(torch.int32 if source.dtype == torch.float32 else torch.int16),
            out.view(torch.int16),
            rows,
            cols,
            KIND=int(DTYPES[source.dtype]),
            PACKED=has_packed_kernels(source.device) and rounding["ROUND"],
            **rounding,
            **tile,
        )
