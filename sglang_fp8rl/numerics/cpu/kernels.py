"""Numba kernels of the CPU cast, on raw bits: NumPy has neither BF16 nor FP8.

An FP32 source is uint32, a BF16 source uint16. Two passes over a strip of `block_n` rows by about
one page, so that the second finds it in the cache:

- `amax` is an integer maximum over the magnitude bits. Rounding is monotonic, so only the amax is
  rounded to BF16, and NaN and Inf sort above every number, so they are seen for free.
- Codes are those of an IEEE quotient, mostly without the division, see `_reciprocal` and `_encode`.
- While a strip is encoded, which is arithmetic, the next one is read for its amax, and the row
  below is fetched.

Both inner loops become vector instructions only while every intermediate stays 32 bits wide, and
Numba widens `uint32 + uint32` to 64: hence the many `np.uint32(...)`.
"""

# Numba reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numba
import numpy as np
from numba.extending import overload

from .jit import fma, jit, pointer, prefetch

# Below it a remainder may have no exact FP32 number.
SMALLEST_FMA_SCALE = np.float32(2.0**-92)
# Of the 128 mantissas of an amax (7 bits): where a product gives the code of the quotient only with
# the reciprocal's next number up or down, and where with neither. Why: `_reciprocal`; that it is so
# in every case: `test_cpu_quotient.py`.
RECIPROCAL_UP = (4, 25, 39, 42, 46, 49, 50, 63, 67, 70, 77, 85, 120, 122, 123)
RECIPROCAL_DOWN = (10, 24, 35, 107)
NO_RECIPROCAL = (38, 54, 56, 68, 76, 80, 82)
CORRECTED = np.int8(2)
_HOW = np.zeros(128, np.int8)  # ulps to add to the reciprocal, or CORRECTED
_HOW[list(RECIPROCAL_UP)], _HOW[list(RECIPROCAL_DOWN)], _HOW[list(NO_RECIPROCAL)] = 1, -1, CORRECTED
CACHE_LINE = 64


def _fp32_bits(x):
    """FP32 bits of a source element: uint32 is FP32 already, uint16 is BF16."""


@overload(_fp32_bits)
def _overload_fp32_bits(x):
    if x == numba.types.uint32:
        return lambda x: x
    return lambda x: np.uint32(np.uint32(x) << np.uint32(16))


@jit()
def _round(bits, half, odd, keep):
    carry = np.uint32(np.uint32(bits >> np.uint32(16)) & odd)
    return np.uint32(np.uint32(np.uint32(bits + half) + carry) & keep)


def _magnitude(x, half, odd, keep):
    """Of a source element, as FP32, after the step to BF16, which BF16 has behind it."""


@overload(_magnitude)
def _overload_magnitude(x, half, odd, keep):
    if x == numba.types.uint32:  # one `and` takes what is rounded away and the sign
        return lambda x, half, odd, keep: _float(_round(x, half, odd, keep & np.uint32(0x7FFFFFFF)))
    return lambda x, half, odd, keep: _float(_fp32_bits(x) & np.uint32(0x7FFFFFFF))


@jit()
def _bits(x):
    return np.float32(x).view(np.uint32)


@jit()
def _float(bits):
    return np.uint32(bits).view(np.float32)


@jit()
def _amax(x, amax):
    amax = np.uint32(amax)
    for c in range(x.size):
        bits = np.uint32(_fp32_bits(x[c]) & np.uint32(0x7FFFFFFF))
        amax = bits if bits > amax else amax
    return amax


@jit()
def _code(y, x):
    """e4m3 of `y`, from 0 to 448 but for rounding, with the sign of the source element `x`.

    Round to nearest even by the FPU: for 2**e <= y < 2**(e+1) the sum y + 2**(e+20) keeps no bit
    below 2**(e-3), which is the e4m3 ulp; e is at least -6, so subnormals need no branch. The low
    bits of the sum are y in ulps, and 0x38 of them, which the exponent's bias takes off again; what
    is above the low byte falls away.
    """
    lowest = np.uint32(0x3C800000)  # 2**-6, the smallest normal e4m3
    lift = np.uint32((20 << 23) + 0x38)
    sign = np.uint32(np.uint32(np.uint32(_fp32_bits(x)) >> np.uint32(24)) & np.uint32(0x80))
    exponent = max(np.uint32(_bits(y) & np.uint32(0x7F800000)), lowest)
    ulps = _bits(y + _float(np.uint32(exponent + lift)))
    return np.uint8(np.uint32(ulps + np.uint32(exponent >> np.uint32(20))) | sign)


@jit()
def _reciprocal(amax, scale, round_keep, pow2_scale):
    """What `_encode` multiplies by instead of dividing by `scale`, or 0 where it has to divide.

    Negative: the product is corrected once by its own remainder.

    A source has 8 significant bits and so has amax = 448 * scale. Unless such a quotient is a tie
    between two codes but for the rounding of `scale`, it is at least 2**-13 of itself away from one:
    an error of 2**-23 changes no code. In a tie, the side depends on two roundings, which have to
    fall as those of the quotient do; so it depends on the mantissa of amax and nothing else.
    """
    if round_keep != np.uint32(0xFFFF0000) or scale < SMALLEST_FMA_SCALE:
        return np.float32(0.0)
    reciprocal = np.float32(1.0) / scale
    if pow2_scale:
        return reciprocal  # exact
    how = _HOW[(amax >> np.uint32(16)) & np.uint32(0x7F)]
    if how == CORRECTED:
        return -reciprocal
    return _float(np.uint32(np.int64(_bits(reciprocal)) + how))


@jit()
def _encode(x, out, scale, reciprocal, round_half, round_odd, round_keep):
    """Codes of a row of one block: those of `x / scale`, IEEE."""
    if reciprocal > np.float32(0.0):
        for c in range(x.size):
            value = _magnitude(x[c], round_half, round_odd, round_keep)
            out[c] = _code(np.float32(value * reciprocal), x[c])
    elif reciprocal < np.float32(0.0):
        for c in range(x.size):
            value = _magnitude(x[c], round_half, round_odd, round_keep)
            quotient = np.float32(value * -reciprocal)
            remainder = fma(np.float32(-quotient), scale, value)
            out[c] = _code(fma(remainder, -reciprocal, quotient), x[c])
    else:
        for c in range(x.size):
            value = _magnitude(x[c], round_half, round_odd, round_keep)
            out[c] = _code(value / scale, x[c])


@jit()
def _scale(amax, pow2_scale):
    """Stored scale from the bits of a finite amax; as `reference.amax_to_scale_inv`."""
    if amax == np.uint32(0):
        return np.float32(1.0)
    scale = max(_float(amax) / np.float32(448.0), np.float32(1.1754943508222875e-38))
    if pow2_scale:
        scale = _float((_bits(scale) + np.uint32(0x007FFFFF)) & np.uint32(0x7F800000))
    return scale


@jit()
def cast_tiles(
    source,
    source_stride,
    codes,
    codes_stride,
    scales,
    scales_stride0,
    scales_stride1,
    nonfinite,
    cols,
    block_n,
    block_k,
    strip,
    round_half,
    round_odd,
    round_keep,
    pow2_scale,
    row_start,
    row_stop,
):
    """Cast whole rows of blocks, `row_start` (a multiple of `block_n`) to `row_stop`.

    `source` (uint32 or uint16), `codes` (uint8) and `scales` (float32) are flat; strides count
    elements. `nonfinite` is uint8 [row blocks, column blocks]. At most `strip` blocks are done together.
    """
    blocks = (cols + block_k - 1) // block_k
    across = (blocks + strip - 1) // strip
    strip = (blocks + across - 1) // across  # of about the same width each
    strips = across * ((row_stop - row_start + block_n - 1) // block_n)
    amaxes = np.zeros((2, strip), np.uint32)  # of this strip and of the next
    scale_of, reciprocal_of = np.empty(strip, np.float32), np.empty(strip, np.float32)
    source_address, codes_address = source.ctypes.data, codes.ctypes.data
    row, first, height, count = row_start, 0, 0, 0
    for s in range(-1, strips):
        now, after = amaxes[s & 1], amaxes[(s + 1) & 1]
        after[:] = 0
        for i in range(count):
            amax = _round(now[i], round_half, round_odd, round_keep)
            # Unsigned, so a NaN that the rounding carries past 0x7fffffff is still above Inf.
            finite = amax < np.uint32(0x7F800000)
            nonfinite[row // block_n, first + i] = not finite
            scale_of[i] = np.float32(0.0)
            if finite:
                scale_of[i] = _scale(amax, pow2_scale)
                reciprocal_of[i] = _reciprocal(amax, scale_of[i], round_keep, pow2_scale)
                scales[row // block_n * scales_stride0 + (first + i) * scales_stride1] = scale_of[i]

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
                    for line in range(0, width * source.itemsize, CACHE_LINE):
                        prefetch(source_address + (start + source_stride) * source.itemsize + line)
                    for line in range(0, width, CACHE_LINE):
                        prefetch(codes_address + (next_row + r) * codes_stride + col + line)
                    after[i] = _amax(source[start : start + width], after[i])
                if i < count and r < height and scale_of[i] != np.float32(0.0):
                    col = (first + i) * block_k
                    width = min(block_k, cols - col)
                    start, begin = (row + r) * source_stride + col, (row + r) * codes_stride + col
                    x, out = source[start : start + width], codes[begin : begin + width]
                    scale, reciprocal = scale_of[i], reciprocal_of[i]
                    _encode(x, out, scale, reciprocal, round_half, round_odd, round_keep)
        row, first, height, count = next_row, next_first, next_height, next_count


@jit()
def cast_region(
    source, wide, source_stride, codes, codes_stride, scales, scales_stride0, scales_stride1,
    nonfinite, rows, cols, block_n, block_k, strip_bytes, half, odd, keep, pow2_scale,
    row_start, row_stop,
):  # fmt: skip
    """`cast_tiles` of a [rows, cols] region, given by addresses; `wide` says that it is FP32."""
    block_rows, block_cols = (rows + block_n - 1) // block_n, (cols + block_k - 1) // block_k
    span = (rows - 1) * source_stride + cols
    codes_span = (rows - 1) * codes_stride + cols
    scales_span = (block_rows - 1) * scales_stride0 + (block_cols - 1) * scales_stride1 + 1
    out = numba.carray(pointer(codes), (codes_span,), np.uint8)
    out_scales = numba.carray(pointer(scales), (scales_span,), np.float32)
    flags = numba.carray(pointer(nonfinite), (block_rows, block_cols), np.uint8)
    if wide:
        cast_tiles(
            numba.carray(pointer(source), (span,), np.uint32), source_stride, out, codes_stride,
            out_scales, scales_stride0, scales_stride1, flags, cols, block_n, block_k,
            max(1, strip_bytes // (4 * block_k)), half, odd, keep, pow2_scale, row_start, row_stop,
        )  # fmt: skip
    else:
        cast_tiles(
            numba.carray(pointer(source), (span,), np.uint16), source_stride, out, codes_stride,
            out_scales, scales_stride0, scales_stride1, flags, cols, block_n, block_k,
            max(1, strip_bytes // (2 * block_k)), half, odd, keep, pow2_scale, row_start, row_stop,
        )  # fmt: skip
