"""Numba kernels of the CPU cast, on raw bits: NumPy has neither BF16 nor FP8.

FP32 is uint32, BF16 uint16, FP16 int16. What is written says what is wanted: uint8 are codes, uint16 what a
server computes with, codes times scales in BF16. Two passes over a strip of `block_n` rows by about
one page, so that the second finds it in the cache:

- `amax` is an integer maximum over the magnitude bits. Rounding is monotonic, so only the amax is
  rounded to BF16, and NaN and Inf sort above every number, so they are seen for free.
- Codes are those of an IEEE quotient, without the division where values are BF16, see `_reciprocal`.
- While a strip is encoded, which is arithmetic, the next one is read for its amax, and the row
  below is fetched.

Both inner loops become vector instructions only while every intermediate stays 32 bits wide, and
Numba widens `uint32 + uint32` to 64: hence the many `np.uint32(...)`.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba.extending import overload

from ..reference import FP8_DTYPE
from .jit import array_at, fma, jit, prefetch

# Mantissas (7 bits) of an amax over which a product with the reciprocal falls to the wrong side of a tie:
# `test_cpu_quotient.py` tries them all.
_IN_TWO_PARTS = np.isin(np.arange(128), (4, 10, 24, 25, 35, 38, 39, 42, 46, 49, 50, 54, 56, 63, 67, 68, 70, 76,
                                         77, 80, 82, 85, 107, 120, 122, 123))  # fmt: skip
CACHE_LINE = 64
# Of each row, between the two passes. Times 128 rows it has to stay in the L2 cache.
STRIP_BYTES = 4096
# Constants of the rounding to BF16: half an ulp less one, the bit that breaks ties, bits to keep.
BF16_STEP = tuple(map(np.uint32, (0x7FFF, 1, 0xFFFF0000)))
NO_STEP = tuple(map(np.uint32, (0, 0, 0xFFFFFFFF)))
# What tells Numba the type of elements: their bits, as the kernels read and write them.
WIDE, SLIM, HALF, CODE = np.uint32(0), np.uint16(0), np.int16(0), np.uint8(0)
UNITS = {torch.float32: WIDE, torch.bfloat16: SLIM, torch.float16: HALF, FP8_DTYPE: CODE}


def _fp32_bits(x):
    """FP32 bits of a source element."""


@overload(_fp32_bits)
def _overload_fp32_bits(x):
    if x == numba.types.uint32:
        return lambda x: x
    if x == numba.types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16))
    return lambda x: _half_to_fp32(np.uint32(np.uint16(x)))


@jit
def _half_to_fp32(half):
    """The exponent is FP32's less 112. A subnormal's is read as the smallest normal's, with a leading one that goes off
    again: as an FP32 subnormal it might be flushed."""
    magnitude = np.uint32(np.uint32(half & np.uint32(0x7FFF)) << np.uint32(13))
    special = np.uint32(0x7F800000) if magnitude >= np.uint32(0x0F800000) else np.uint32(0)
    one = np.uint32(113 << 23) if magnitude < np.uint32(1 << 23) else np.uint32(0)  # 2**-14
    lift = max(one, np.uint32(112 << 23))
    bits = np.uint32(_bits(_float(np.uint32(magnitude + lift)) - _float(one)) | special)
    return np.uint32(bits | np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16)))


def narrowed(bits, like):
    """Bits of the dtype that `like` is an element of, from finite FP32 bits, rounded to nearest even."""


@overload(narrowed)
def _overload_narrowed(bits, like):
    if like == numba.types.uint32:
        return lambda bits, like: bits
    if like == numba.types.uint16:
        return lambda bits, like: np.uint16(_round(bits, BF16_STEP) >> np.uint32(16))
    return lambda bits, like: np.int16(_fp32_to_half(bits))


@jit
def _fp32_to_half(bits):
    """The bits of FP16 that `_half_to_fp32` takes, from 65520 down: rounded by the FPU, as `_code` is."""
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    smallest = np.uint32(113 << 23)  # 2**-14, the smallest normal; below, ulps are those of it
    exponent = max(np.uint32(magnitude & np.uint32(0x7F800000)), smallest)
    lift = np.uint32(exponent + np.uint32(13 << 23))
    ulps = np.uint32(_bits(_float(magnitude) + _float(lift)) - lift)
    half = np.uint32(ulps + np.uint32(np.uint32(exponent - smallest) >> np.uint32(13)))
    return np.uint32(half | np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000)))


@jit
def _round(bits, step):
    half, odd, keep = step
    carry = np.uint32(np.uint32(bits >> np.uint32(16)) & odd)
    return np.uint32(np.uint32(np.uint32(bits + half) + carry) & keep)


def _magnitude(x, step):
    """Of a source element, as FP32, after the step to BF16, which BF16 has behind it."""


@overload(_magnitude)
def _overload_magnitude(x, step):
    if x == numba.types.uint16:
        return lambda x, step: _float(_fp32_bits(x) & np.uint32(0x7FFFFFFF))
    return lambda x, step: _float(  # one `and` takes what is rounded away and the sign
        _round(_fp32_bits(x), (step[0], step[1], step[2] & np.uint32(0x7FFFFFFF)))
    )


@jit
def _bits(x):
    return np.float32(x).view(np.uint32)


@jit
def _float(bits):
    return np.uint32(bits).view(np.float32)


@jit
def _amax(x, amax):
    largest, magnitude = np.uint32(0), np.uint32(0x7FFFFFFF if x.itemsize == 4 else 0x7FFF)
    for c in range(x.size):
        bits = np.uint32(np.uint32(x[c]) & magnitude)
        largest = bits if bits > largest else largest
    return max(np.uint32(amax), np.uint32(_fp32_bits(x.dtype.type(largest))))


@jit
def _code(y, x):
    """e4m3 of `y`, from 0 to 448 but for rounding, with the sign of the source element `x`.

    Round to nearest even by the FPU: for 2**e <= y < 2**(e+1) the sum y + 2**(e+20) keeps no bit
    below 2**(e-3), which is the e4m3 ulp; e is at least -6, so subnormals need no branch. The low
    byte of the sum is y in ulps, and 0x38 of them, which the exponent's bias takes off again.
    """
    lowest = np.uint32(0x3C800000)  # 2**-6, the smallest normal e4m3
    lift = np.uint32((20 << 23) + 0x38)
    sign = np.uint32(np.uint32(np.uint32(_fp32_bits(x)) >> np.uint32(24)) & np.uint32(0x80))
    exponent = max(np.uint32(_bits(y) & np.uint32(0x7F800000)), lowest)
    ulps = _bits(y + _float(np.uint32(exponent + lift)))
    return np.uint8(np.uint32(ulps + np.uint32(exponent >> np.uint32(20))) | sign)


@jit
def _served(y, scale, x):
    """BF16 bits of `y` (as of `_code`) rounded to e4m3, times `scale`, with the sign of `x`."""
    lowest = np.uint32(0x3C800000)  # 2**-6, the smallest normal e4m3
    exponent = max(np.uint32(_bits(y) & np.uint32(0x7F800000)), lowest)
    lift = _float(np.uint32(exponent + np.uint32(20 << 23)))
    bits = _bits(np.float32(np.float32(np.float32(y + lift) - lift) * scale))
    sign = np.uint32(_fp32_bits(x) & np.uint32(0x80000000))
    return np.uint16(np.uint32(_round(bits, BF16_STEP) | sign) >> np.uint32(16))


@jit
def _stored(y, scale, x, is_code):
    """What is written for `y`: its code, or the value of that."""
    return _code(y, x) if is_code else _served(y, scale, x)


@jit
def _as_it_is(x, out):
    """A row of a block that is not finite, in BF16."""
    for c in range(x.size):
        bits = np.uint32(_fp32_bits(x[c]))
        if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            bits |= np.uint32(0x00400000)  # a NaN stays one without its low bits
        else:
            bits = _round(bits, BF16_STEP)
        out[c] = out.dtype.type(bits >> np.uint32(16))


@jit
def _reciprocal(amax, scale, step):
    """`(near, rest)` as `triton.arithmetic.reciprocal`: a BF16 value times both gives the code of its quotient.

    `rest` is 0 where `near` alone does; `near`, where a source is not rounded to BF16: it has to be divided.
    """
    if step[2] != np.uint32(0xFFFF0000):
        return np.float32(0.0), np.float32(0.0)
    one, near = np.float32(1.0), np.float32(np.float32(1.0) / scale)
    if not _IN_TWO_PARTS[np.uint32(amax >> np.uint32(16)) & np.uint32(0x7F)]:
        return near, np.float32(0.0)
    if fma(np.float32(-scale), near, one) < np.float32(0.0):
        near = _float(np.uint32(_bits(near) - np.uint32(1)))
    return near, np.float32(fma(np.float32(-scale), near, one) * near)


@jit
def _encode(x, out, scale, reciprocal, step):
    """A row of one block: codes of `x / scale`, IEEE, or their values."""
    is_code, (near, rest) = out.itemsize == 1, reciprocal
    if near > np.float32(0.0) and rest == np.float32(0.0):
        for c in range(x.size):
            value = _magnitude(x[c], step)
            out[c] = _stored(np.float32(value * near), scale, x[c], is_code)
    elif near > np.float32(0.0):
        for c in range(x.size):
            value = _magnitude(x[c], step)
            out[c] = _stored(fma(value, near, np.float32(value * rest)), scale, x[c], is_code)
    else:
        for c in range(x.size):
            value = _magnitude(x[c], step)
            out[c] = _stored(value / scale, scale, x[c], is_code)


@jit
def _scale(amax, pow2_scale):
    """Stored scale from the bits of a finite amax; as `reference.amax_to_scale_inv`."""
    if amax == np.uint32(0):
        return np.float32(1.0)
    scale = max(_float(amax) / np.float32(448.0), np.float32(1.1754943508222875e-38))
    if pow2_scale:
        scale = _float((_bits(scale) + np.uint32(0x007FFFFF)) & np.uint32(0x7F800000))
    return scale


@jit
def _fetch(address, nbytes):
    for line in range(0, nbytes, CACHE_LINE):
        prefetch(address + line)


@jit
def cast_region(
    source, source_unit, source_stride, target, target_unit, target_stride,
    scales, scales_stride0, scales_stride1, nonfinite, rows, cols, block_n, block_k,
    step, pow2_scale, row_start, row_stop,
):  # fmt: skip
    """Cast whole rows of blocks of a [rows, cols] region, `row_start` (a multiple of `block_n`) to `row_stop`.

    Source, target (codes or their values), FP32 scales and uint8 flags [row blocks, column blocks] are
    given by address, strides in elements; a unit is a number of the elements' type.
    """
    blocks = (cols + block_k - 1) // block_k
    block_rows = (rows + block_n - 1) // block_n
    x = array_at(source, (rows - 1) * source_stride + cols, source_unit)
    out = array_at(target, (rows - 1) * target_stride + cols, target_unit)
    scales_span = (block_rows - 1) * scales_stride0 + (blocks - 1) * scales_stride1 + 1
    out_scales = array_at(scales, scales_span, np.float32(0))
    flags = array_at(nonfinite, block_rows * blocks, np.uint8(0))
    strip = max(1, STRIP_BYTES // (x.itemsize * block_k))
    across = (blocks + strip - 1) // strip
    strip = (blocks + across - 1) // across  # of about the same width each
    strips = across * ((row_stop - row_start + block_n - 1) // block_n)
    amaxes = np.zeros((2, strip), np.uint32)  # of this strip and of the next
    scale_of, reciprocal_of = np.empty(strip, np.float32), np.empty((strip, 2), np.float32)
    row, first, height, count = row_start, 0, 0, 0
    for s in range(-1, strips):
        now, after = amaxes[s & 1], amaxes[(s + 1) & 1]
        after[:] = 0
        for i in range(count):
            amax = _round(now[i], step)
            # Unsigned, so a NaN that the rounding carries past 0x7fffffff is still above Inf.
            finite = amax < np.uint32(0x7F800000)
            flags[row // block_n * blocks + first + i] = not finite
            scale_of[i] = np.float32(0.0)
            if finite:
                scale_of[i] = _scale(amax, pow2_scale)
                reciprocal_of[i] = _reciprocal(amax, scale_of[i], step)
                at = row // block_n * scales_stride0 + (first + i) * scales_stride1
                out_scales[at] = scale_of[i]

        next_row = row_start + (s + 1) // across * block_n
        next_first = (s + 1) % across * strip
        next_height = min(block_n, row_stop - next_row)  # not positive behind the last strip
        next_count = min(strip, blocks - next_first)
        for r in range(max(height, next_height)):
            for i in range(max(count, next_count)):
                if i < next_count and r < next_height:
                    col = (next_first + i) * block_k
                    width = min(block_k, cols - col)
                    start = (next_row + r) * source_stride + col
                    begin = (next_row + r) * target_stride + col
                    _fetch(source + (start + source_stride) * x.itemsize, width * x.itemsize)
                    _fetch(target + begin * out.itemsize, width * out.itemsize)
                    after[i] = _amax(x[start : start + width], after[i])
                if i < count and r < height:
                    col = (first + i) * block_k
                    width = min(block_k, cols - col)
                    start, begin = (row + r) * source_stride + col, (row + r) * target_stride + col
                    values, to = x[start : start + width], out[begin : begin + width]
                    if scale_of[i] != np.float32(0.0):
                        _encode(
                            values,
                            to,
                            scale_of[i],
                            (reciprocal_of[i, 0], reciprocal_of[i, 1]),
                            step,
                        )
                    elif out.itemsize > 1:  # codes stay; what is computed with shows it
                        _as_it_is(values, to)
        row, first, height, count = next_row, next_first, next_height, next_count
