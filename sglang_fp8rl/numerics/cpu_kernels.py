"""Numba kernels of the CPU cast, on raw bits: NumPy has neither BF16 nor FP8.

An FP32 source is uint32, a BF16 source uint16. Two passes over a strip of `block_n` rows by about
one page, so that the second finds it in the cache:

- `amax` is an integer maximum over the magnitude bits. Rounding is monotonic, so only the amax is
  rounded to BF16, and NaN and Inf sort above every number, so they are seen for free.
- Codes come from one IEEE division and one IEEE addition, see `_encode`.

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
def _encode(x, out, scale, round_half, round_odd, round_keep):
    """Codes of a row of one block.

    Round to nearest even by the FPU: for 2**e <= |y| < 2**(e+1) the sum |y| + 2**(e+20) keeps no
    bit below 2**(e-3), which is the e4m3 ulp; e is at least -6, so subnormals need no branch. What
    the sum added to the bits of 2**(e+20) is |y| in ulps.
    """
    magnitude = np.uint32(0x7FFFFFFF)
    top = np.uint32(0x43E00000)  # 448.0
    lowest = np.uint32(0x3C800000)  # 2**-6, the smallest normal e4m3
    lift = np.uint32(20 << 23)
    for c in range(x.size):
        bits = _round(_fp32_bits(x[c]), round_half, round_odd, round_keep)
        y = _bits(_float(bits) / scale)
        sign = np.uint32(np.uint32(y >> np.uint32(24)) & np.uint32(0x80))
        a = min(np.uint32(y & magnitude), top)
        exponent = max(np.uint32(a & np.uint32(0x7F800000)), lowest)
        magic = np.uint32(exponent + lift)
        ulps = np.uint32(_bits(_float(a) + _float(magic)) - magic)
        code = np.uint32(ulps + (np.uint32(exponent - lowest) >> np.uint32(20)))
        out[c] = np.uint8(code | sign)


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
                    scales[block_row * scales_stride0 + (first + i) * scales_stride1] = (
                        strip_scales[i]
                    )

            for r in range(row, row_end):
                for i in range(count):
                    if strip_scales[i] == np.float32(0.0):  # not finite: old bytes stay
                        continue
                    col = (first + i) * block_k
                    width = min(block_k, cols - col)
                    x = source[r * source_stride + col : r * source_stride + col + width]
                    out = codes[r * codes_stride + col : r * codes_stride + col + width]
                    _encode(x, out, strip_scales[i], round_half, round_odd, round_keep)
