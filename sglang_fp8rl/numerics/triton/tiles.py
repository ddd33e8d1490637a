"""What a program does with its 128×128 block or row, of a table's piece or of one matrix.

Sources and targets are given by the address of the matrix, with the stride of its rows in elements. Addresses
are numbers, so Triton knows nothing of them, and without knowing it loads elements one by one. Hence the
alignments, in bytes, that divide an address and the stride of its rows (of a target, its columns too); they are
told where they are used, because what is said of a value is lost where it enters or leaves a function.

Every function returns whether all was finite; if not, codes, copies and scales stay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import (
    BF16,
    FP16,
    FP32,
    amax_to_scale_inv,
    codes_of,
    fp32_bits,
    packed_bf16,
    packed_largest_magnitude,
    round_bits_to_bf16,
    served_of,
)


@triton.jit
def known_multiple(x, OF: tl.constexpr):
    """`x`, which is a multiple of `OF`, in a form that shows it."""
    return x // OF * OF


@triton.jit
def cast_tile(
    source, source_stride, target, target_stride, scales, scales_n, scales_k, rows, cols, block_n, block_k,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr, TARGET_ALIGN: tl.constexpr, THROUGH: tl.constexpr,
    KIND: tl.constexpr, POW2: tl.constexpr, ROUND: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Block (`block_n`, `block_k`) of `HEIGHT` rows and `WIDTH` columns, or a channel: one row in `WIDTH`.

    `rows` and `cols` of the matrix count only if `RAGGED`. `THROUGH` writes what a server computes with, in BF16, of
    a block that is not finite too, and no scale; both matrices are contiguous, of at most 2**24 columns.
    """
    size: tl.constexpr = 4 if KIND == FP32 else 2
    bits: tl.constexpr = tl.int32 if KIND == FP32 else tl.int16
    target_size: tl.constexpr = 2 if THROUGH else 1
    target_bits: tl.constexpr = tl.int16 if THROUGH else tl.int8
    first_row, first_col = block_n * HEIGHT, block_k * WIDTH
    n, k = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    if THROUGH:  # offsets in a block fit 32 bits, and registers are short
        source_stride, target_stride = source_stride.to(tl.int32), target_stride.to(tl.int32)
    else:
        n = n.to(tl.int64)
    source_stride = known_multiple(source_stride, SOURCE_ALIGN // size)
    target_stride = known_multiple(target_stride, TARGET_ALIGN // target_size)
    source += (first_row.to(tl.int64) * source_stride + first_col) * size
    source = tl.multiple_of(source.to(tl.pointer_type(bits)), SOURCE_ALIGN)
    target += (first_row.to(tl.int64) * target_stride + first_col) * target_size
    target = tl.multiple_of(target.to(tl.pointer_type(target_bits)), TARGET_ALIGN)
    rows, cols = (rows - first_row).to(tl.int32), (cols - first_col).to(tl.int32)
    inside = k < known_multiple(cols, TARGET_ALIGN // target_size)
    if RAGGED and THROUGH:
        # Behind the last row it is read again, and written again with the same values: rows need no mask.
        n = tl.minimum(n, rows - 1)
    elif RAGGED and HEIGHT > 1:
        inside = (n < rows) & inside
    where = source + k + n * source_stride
    x = tl.load(where, mask=inside, other=0) if RAGGED else tl.load(where)
    if PACKED:
        x = packed_bf16(x, KIND)
        scale, finite = amax_to_scale_inv(packed_largest_magnitude(x), POW2, False)
    else:
        magnitudes = tl.reshape(fp32_bits(x, KIND) & 0x7FFFFFFF, [x.numel])
        scale, finite = amax_to_scale_inv(tl.max(magnitudes, axis=0), POW2, ROUND)
    to = target + k + n * target_stride
    if THROUGH:
        served = served_of(x, scale, finite, KIND, ROUND, PACKED)
        tl.store(to, served, mask=inside if RAGGED else None)
    else:
        codes = codes_of(x, scale, KIND, ROUND, PACKED)
        if finite:
            tl.store(to, codes, mask=inside if RAGGED else None)
        at = block_n.to(tl.int64) * scales_n + block_k.to(tl.int64) * scales_k
        tl.store(scales.to(tl.pointer_type(tl.float32)) + at, scale, mask=finite)
    return finite


@triton.jit
def copy_row(
    source, source_stride, target, target_stride, cols, n,
    SOURCE_ALIGN: tl.constexpr, TARGET_ALIGN: tl.constexpr, CHUNK: tl.constexpr,
    KIND: tl.constexpr, TO: tl.constexpr, SCALES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Row `n` of at most `CHUNK` columns to FP32, BF16 or FP16, if all of it stays finite; of `SCALES`, if all is
    positive too."""
    # FP32 bits of Inf, or of the smallest number that is Inf in BF16 or in FP16.
    LIMIT: tl.constexpr = 0x7F800000 if TO == FP32 else 0x7F7F8000 if TO == BF16 else 0x477FF000
    size: tl.constexpr = 4 if KIND == FP32 else 2
    bits: tl.constexpr = tl.int32 if KIND == FP32 else tl.int16
    target_size: tl.constexpr = 4 if TO == FP32 else 2
    target_bits: tl.constexpr = tl.int32 if TO == FP32 else tl.int16
    n = n.to(tl.int64)
    source += n * source_stride * size
    source = tl.multiple_of(source.to(tl.pointer_type(bits)), SOURCE_ALIGN)
    target += n * target_stride * target_size
    target = tl.multiple_of(target.to(tl.pointer_type(target_bits)), TARGET_ALIGN)
    cols = known_multiple(cols.to(tl.int32), TARGET_ALIGN // target_size)
    k = tl.arange(0, CHUNK)
    x = tl.load(source + k, mask=k < cols, other=0)
    if PACKED and KIND == BF16:
        finite = packed_largest_magnitude(x) < LIMIT
    else:
        # What is no scale counts as infinite.
        limited = tl.where((k < cols) & (x <= 0), 0x7F800000, x) if SCALES else fp32_bits(x, KIND)
        finite = tl.max(limited & 0x7FFFFFFF, axis=0) < LIMIT
    written = known_multiple(tl.where(finite, cols, 0), TARGET_ALIGN // target_size)
    tl.store(target + k, copied(x, KIND, TO, PACKED), mask=k < written)
    return finite


@triton.jit
def copied(x, KIND: tl.constexpr, TO: tl.constexpr, PACKED: tl.constexpr):
    """Bits of the destination from bits of the source."""
    if KIND == TO:
        bits = x
    elif TO == FP32:
        bits = fp32_bits(x, KIND)
    elif TO == FP16:
        wide = fp32_bits(x, KIND).to(tl.float32, bitcast=True)
        bits = wide.to(tl.float16).to(tl.int16, bitcast=True)
    elif PACKED:
        bits = packed_bf16(x, KIND)
    else:
        bits = (round_bits_to_bf16(fp32_bits(x, KIND)) >> 16).to(tl.int16)
    return bits
