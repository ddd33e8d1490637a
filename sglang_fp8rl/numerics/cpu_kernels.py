"""Numba kernels of the CPU cast, on raw bits: NumPy has neither BF16 nor FP8.

An FP32 source is uint32, a BF16 source uint16. Two passes over a strip of `block_n` rows by about
one page, so that the second finds it in the cache:

- `amax` is an integer maximum over the magnitude bits. Rounding is monotonic, so only the amax is
  rounded to BF16, and NaN and Inf sort above every number, so they are seen for free.
- Codes are those of an IEEE quotient, mostly without the division, see `_reciprocal` and `_encode`.
- While a strip is encoded, which is arithmetic, the next one is fetched from memory.

Both inner loops become vector instructions only while every intermediate stays 32 bits wide, and
Numba widens `uint32 + uint32` to 64: hence the many `np.uint32(...)`.
"""

# Numba reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.extending import overload

from .cpu_intrinsics import fma, pointer, prefetch

# Below it a remainder may have no exact FP32 number.
SMALLEST_FMA_SCALE = np.float32(2.0**-92)
# Of the 128 mantissas of an amax (7 bits): where a product gives the code of the quotient only with
# the reciprocal's next number up or down, and where with neither. `test_cpu_quotient.py` has both
# why and all cases.
RECIPROCAL_UP = (4, 25, 39, 42, 46, 49, 50, 63, 67, 70, 77, 85, 120, 122, 123)
RECIPROCAL_DOWN = (10, 24, 35, 107)
NO_RECIPROCAL = (38, 54, 56, 68, 76, 80, 82)
CORRECTED = np.int8(2)
_HOW = np.zeros(128, np.int8)  # ulps to add to the reciprocal, or CORRECTED
_HOW[list(RECIPROCAL_UP)], _HOW[list(RECIPROCAL_DOWN)], _HOW[list(NO_RECIPROCAL)] = 1, -1, CORRECTED
CACHE_LINE = 64


def _jit(function: Any) -> Any:
    """`njit`, cached on disk where that is possible: servers start often, on read-only images too."""
    options = {"nogil": True, "fastmath": False, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "cannot cache function: no locator available"
        return numba.njit(**options)(function)


def _fp32_bits(x):
    """FP32 bits of a source element: uint32 is FP32 already, uint16 is BF16."""


@overload(_fp32_bits)
def _overload_fp32_bits(x):
    if x == numba.types.uint32:
        return lambda x: x
    return lambda x: np.uint32(np.uint32(x) << np.uint32(16))


@_jit
def _round(bits, half, odd, keep):
    carry = np.uint32(np.uint32(bits >> np.uint32(16)) & odd)
    return np.uint32(np.uint32(np.uint32(bits + half) + carry) & keep)


def _rounded(x, half, odd, keep):
    """FP32 bits of a source element after the step to BF16, which BF16 has behind it."""


@overload(_rounded)
def _overload_rounded(x, half, odd, keep):
    if x == numba.types.uint32:
        return lambda x, half, odd, keep: _round(x, half, odd, keep)
    return lambda x, half, odd, keep: _fp32_bits(x)


@_jit
def _bits(x):
    return np.float32(x).view(np.uint32)


@_jit
def _float(bits):
    return np.uint32(bits).view(np.float32)


@_jit
def _amax(x, amax):
    amax = np.uint32(amax)
    for c in range(x.size):
        bits = np.uint32(_fp32_bits(x[c]) & np.uint32(0x7FFFFFFF))
        amax = bits if bits > amax else amax
    return amax


@_jit
def _code(y, source):
    """e4m3 of the magnitude of `y`, at most 448 but for rounding, with the sign of `source`.

    Round to nearest even by the FPU: for 2**e <= |y| < 2**(e+1) the sum |y| + 2**(e+20) keeps no
    bit below 2**(e-3), which is the e4m3 ulp; e is at least -6, so subnormals need no branch. The
    low bits of the sum are |y| in ulps, and 0x38 of them, which the exponent's bias takes off again;
    what is above the low byte falls away.
    """
    lowest = np.uint32(0x3C800000)  # 2**-6, the smallest normal e4m3
    lift = np.uint32((20 << 23) + 0x38)
    sign = np.uint32(np.uint32(_bits(source) >> np.uint32(24)) & np.uint32(0x80))
    bits = _bits(y)
    exponent = max(np.uint32(bits & np.uint32(0x7F800000)), lowest)
    magnitude = _float(bits & np.uint32(0x7FFFFFFF))
    ulps = _bits(magnitude + _float(np.uint32(exponent + lift)))
    return np.uint8(np.uint32(ulps + np.uint32(exponent >> np.uint32(20))) | sign)


@_jit
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


@_jit
def _encode(x, out, scale, reciprocal, round_half, round_odd, round_keep):
    """Codes of a row of one block: those of `x / scale`, IEEE."""
    if reciprocal > np.float32(0.0):
        for c in range(x.size):
            value = _float(_rounded(x[c], round_half, round_odd, round_keep))
            out[c] = _code(np.float32(value * reciprocal), value)
    elif reciprocal < np.float32(0.0):
        for c in range(x.size):
            value = _float(_rounded(x[c], round_half, round_odd, round_keep))
            quotient = np.float32(value * -reciprocal)
            remainder = fma(np.float32(-quotient), scale, value)
            out[c] = _code(fma(remainder, -reciprocal, quotient), value)
    else:
        for c in range(x.size):
            value = _float(_rounded(x[c], round_half, round_odd, round_keep))
            out[c] = _code(value / scale, value)


@_jit
def _scale(amax, pow2_scale):
    """Stored scale from the bits of a finite amax; as `reference.amax_to_scale_inv`."""
    if amax == np.uint32(0):
        return np.float32(1.0)
    scale = max(_float(amax) / np.float32(448.0), np.float32(1.1754943508222875e-38))
    if pow2_scale:
        scale = _float((_bits(scale) + np.uint32(0x007FFFFF)) & np.uint32(0x7F800000))
    return scale


@_jit
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
    elements. `nonfinite` is uint8 [row blocks, column blocks]. `strip` blocks are done together.
    """
    blocks = (cols + block_k - 1) // block_k
    amaxes = np.empty(strip, np.uint32)
    strip_scales = np.empty(strip, np.float32)
    reciprocals = np.empty(strip, np.float32)
    source_address, itemsize = source.ctypes.data, source.itemsize
    codes_address = codes.ctypes.data
    for row in range(row_start, row_stop, block_n):
        row_end = min(row + block_n, row_stop)
        block_row = row // block_n
        for first in range(0, blocks, strip):
            count = min(strip, blocks - first)

            amaxes[:] = 0
            for r in range(row, row_end):
                for i in range(count):
                    col = (first + i) * block_k
                    width = min(block_k, cols - col)
                    start = r * source_stride + col
                    amaxes[i] = _amax(source[start : start + width], amaxes[i])

            for i in range(count):
                amax = _round(amaxes[i], round_half, round_odd, round_keep)
                # Unsigned, so a NaN that the rounding carries past 0x7fffffff is still above Inf.
                finite = amax < np.uint32(0x7F800000)
                nonfinite[block_row, first + i] = not finite
                strip_scales[i] = _scale(amax, pow2_scale) if finite else np.float32(0.0)
                if finite:
                    scale = strip_scales[i]
                    reciprocals[i] = _reciprocal(amax, scale, round_keep, pow2_scale)
                    scales[block_row * scales_stride0 + (first + i) * scales_stride1] = (
                        strip_scales[i]
                    )

            ahead, ahead_row = first + count, row
            if ahead >= blocks:
                ahead, ahead_row = 0, row_end
            for r in range(row, row_end):
                next_row = min(ahead_row + r - row, row_stop - 1)
                for i in range(count):
                    next_col = (ahead + i) * block_k
                    next_read = next_row * source_stride + next_col
                    for line in range(0, block_k * itemsize, CACHE_LINE):
                        prefetch(source_address + next_read * itemsize + line)
                    next_written = next_row * codes_stride + next_col
                    for line in range(0, block_k, CACHE_LINE):
                        prefetch(codes_address + next_written + line)
                    if strip_scales[i] == np.float32(0.0):  # not finite: old bytes stay
                        continue
                    col = (first + i) * block_k
                    width = min(block_k, cols - col)
                    x = source[r * source_stride + col : r * source_stride + col + width]
                    out = codes[r * codes_stride + col : r * codes_stride + col + width]
                    scale, reciprocal = strip_scales[i], reciprocals[i]
                    _encode(x, out, scale, reciprocal, round_half, round_odd, round_keep)


@_jit
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
