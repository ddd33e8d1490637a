"""A tile, a row or a copy of one, from memory to memory: what a program of every cast does.

Addresses come as numbers, so Triton knows nothing of them, and without knowing it loads elements one
by one. Hence the alignments, in bytes, that divide an address and the stride of its rows; they are
told to Triton here, because what is said of a value is lost where it enters or leaves a function.
"""

# Triton reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import (
    BF16,
    FP32,
    amax_to_scale_inv,
    codes_of,
    fp32_bits,
    largest_magnitude,
    packed_bf16,
    packed_largest_magnitude,
    round_bits_to_bf16,
    scale_of,
)


@triton.jit
def known_multiple(x, OF: tl.constexpr):
    """`x`, which is a multiple of `OF`, in a form that shows it."""
    return x // OF * OF


@triton.jit
def cast_tile(
    source_address,
    source_stride,
    column_stride,
    target_address,
    target_stride,
    rows,
    cols,
    RAGGED: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
    KIND: tl.constexpr,
    POW2: tl.constexpr,
    ROUND: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Cast one 128×128 tile: codes are written here if all is finite; returns (scale, finite).

    Args:
        source_address, target_address: int64, of the tile's first element.
        source_stride, target_stride: int64, elements between rows; `column_stride`: of the source,
            between columns, mostly the constant 1.
        rows, cols: int32, what is left from the tile's corner on; read if `RAGGED`.
        SOURCE_ALIGN: bytes that divide source address and stride.
        TARGET_ALIGN: bytes that divide target address, stride and `cols`.
    """
    size: tl.constexpr = 4 if KIND == FP32 else 2
    bits: tl.constexpr = tl.int32 if KIND == FP32 else tl.int16
    source = tl.multiple_of(source_address.to(tl.pointer_type(bits)), SOURCE_ALIGN)
    source_stride = known_multiple(source_stride, SOURCE_ALIGN // size)
    target = tl.multiple_of(target_address.to(tl.pointer_type(tl.int8)), TARGET_ALIGN)
    target_stride = known_multiple(target_stride, TARGET_ALIGN)
    n, k = tl.arange(0, 128), tl.arange(0, 128)
    where = source + (n.to(tl.int64)[:, None] * source_stride + k[None, :] * column_stride)
    if RAGGED:
        inside = (n < rows)[:, None] & (k < known_multiple(cols, TARGET_ALIGN))[None, :]
        x = tl.load(where, mask=inside, other=0)
    else:
        x = tl.load(where)
    if PACKED:
        x = packed_bf16(x, KIND)
    scale, finite = scale_of(x, KIND, POW2, ROUND, PACKED)
    codes = codes_of(x, scale, KIND, ROUND, PACKED)
    to = target + (n.to(tl.int64)[:, None] * target_stride + k[None, :])
    if finite:
        if RAGGED:
            tl.store(to, codes, mask=inside)
        else:
            tl.store(to, codes)
    return scale, finite


@triton.jit
def cast_row(
    source_address,
    column_stride,
    target_address,
    cols,
    CHUNK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
    KIND: tl.constexpr,
    POW2: tl.constexpr,
    ROUND: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Cast one row of `cols` elements as `cast_tile` does a tile: read once if it is `ONE_CHUNK`,
    else twice, the second time from the cache.
    """
    bits: tl.constexpr = tl.int32 if KIND == FP32 else tl.int16
    source = tl.multiple_of(source_address.to(tl.pointer_type(bits)), SOURCE_ALIGN)
    target = tl.multiple_of(target_address.to(tl.pointer_type(tl.int8)), TARGET_ALIGN)
    cols = known_multiple(cols, TARGET_ALIGN)
    k = tl.arange(0, CHUNK)
    if ONE_CHUNK:
        x = tl.load(source + k.to(tl.int64) * column_stride, mask=k < cols, other=0)
        if PACKED:
            x = packed_bf16(x, KIND)
        scale, finite = scale_of(x, KIND, POW2, ROUND, PACKED)
        tl.store(target + k, codes_of(x, scale, KIND, ROUND, PACKED), mask=(k < cols) & finite)
    else:
        largest = tl.zeros([CHUNK], tl.int32)
        for first in range(0, cols, CHUNK):
            at = first + k
            x = tl.load(source + at.to(tl.int64) * column_stride, mask=at < cols, other=0)
            largest = tl.maximum(largest, fp32_bits(x, KIND) & 0x7FFFFFFF)
        scale, finite = amax_to_scale_inv(tl.max(largest, axis=0), POW2, ROUND)
        for first in range(0, cols, CHUNK):
            at = first + k
            x = tl.load(source + at.to(tl.int64) * column_stride, mask=at < cols, other=0)
            if PACKED:
                x = packed_bf16(x, KIND)
            codes = codes_of(x, scale, KIND, ROUND, PACKED)
            tl.store(target + at, codes, mask=(at < cols) & finite)
    return scale, finite


@triton.jit
def copy_row(
    source_address,
    target_address,
    cols,
    CHUNK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
    KIND: tl.constexpr,
    TO_FP32: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Copy one row to FP32 or BF16 if all of it stays finite; returns whether it does."""
    # Of FP32 bits: Inf, or the smallest number that is Inf in BF16.
    LIMIT: tl.constexpr = 0x7F7F8000 if KIND == FP32 and not TO_FP32 else 0x7F800000
    bits: tl.constexpr = tl.int32 if KIND == FP32 else tl.int16
    source = tl.multiple_of(source_address.to(tl.pointer_type(bits)), SOURCE_ALIGN)
    if TO_FP32:
        target = tl.multiple_of(target_address.to(tl.pointer_type(tl.int32)), TARGET_ALIGN)
        cols = known_multiple(cols, TARGET_ALIGN // 4)
    else:
        target = tl.multiple_of(target_address.to(tl.pointer_type(tl.int16)), TARGET_ALIGN)
        cols = known_multiple(cols, TARGET_ALIGN // 2)
    k = tl.arange(0, CHUNK)
    if ONE_CHUNK:
        x = tl.load(source + k, mask=k < cols, other=0)
        if PACKED and KIND == BF16:
            finite = packed_largest_magnitude(x) < LIMIT
        else:
            finite = largest_magnitude(x, KIND) < LIMIT
        tl.store(target + k, copied(x, KIND, TO_FP32, PACKED), mask=(k < cols) & finite)
    else:
        largest = tl.zeros([CHUNK], tl.int32)
        for first in range(0, cols, CHUNK):
            at = first + k
            x = tl.load(source + at, mask=at < cols, other=0)
            largest = tl.maximum(largest, fp32_bits(x, KIND) & 0x7FFFFFFF)
        finite = tl.max(largest, axis=0) < LIMIT
        for first in range(0, cols, CHUNK):
            at = first + k
            x = tl.load(source + at, mask=at < cols, other=0)
            x = copied(x, KIND, TO_FP32, PACKED)
            tl.store(target + at, x, mask=(at < cols) & finite)
    return finite


@triton.jit
def copied(x, KIND: tl.constexpr, TO_FP32: tl.constexpr, PACKED: tl.constexpr):
    """Bits of the destination from bits of the source."""
    if TO_FP32:
        bits = fp32_bits(x, KIND)
    elif KIND == BF16:
        bits = x
    elif PACKED:
        bits = packed_bf16(x, KIND)
    else:
        bits = (round_bits_to_bf16(fp32_bits(x, KIND)) >> 16).to(tl.int16)
    return bits
