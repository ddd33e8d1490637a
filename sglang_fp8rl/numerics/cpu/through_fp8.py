"""The cast and back on the CPU: a weight is read once from memory, and what is served written once."""

# Numba reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import numba
import numpy as np
import torch

from ..grid import ScaleGranularity
from .cast import BF16_STEP, NO_STEP, STRIP_BYTES, by_rows
from .jit import fma, jit, pointer
from .kernels import _amax, _bits, _float, _fp32_bits, _magnitude, _reciprocal, _round, _scale


def through_fp8_into(
    source: torch.Tensor,
    out: torch.Tensor,
    granularity: ScaleGranularity,
    pow2_scale: bool,
    round_to_bf16: bool,
) -> None:
    """As `reference.through_fp8_into`, by bytes; a NaN may have other bits."""
    block_n, block_k = granularity.block(source.shape)
    source = (source.float() if source.dtype == torch.float16 else source).contiguous()
    rows, cols = source.shape
    run = partial(
        through_region,
        source.data_ptr(),
        source.dtype == torch.float32,
        out.data_ptr(),
        rows,
        cols,
        block_n,
        block_k,
        max(1, STRIP_BYTES // (source.element_size() * block_k)),
        *(BF16_STEP if round_to_bf16 else NO_STEP),
        bool(pow2_scale),
    )
    by_rows(run, rows, cols, block_n, None)


@jit()
def _value(y, scale, x):
    """BF16 bits of `y` (as of `kernels._code`) rounded to e4m3, times `scale`, with the sign of `x`."""
    lowest = np.uint32(0x3C800000)  # 2**-6, the smallest normal e4m3
    exponent = max(np.uint32(_bits(y) & np.uint32(0x7F800000)), lowest)
    lift = _float(np.uint32(exponent + np.uint32(20 << 23)))
    rounded = np.float32(np.float32(y + lift) - lift)
    bits = _bits(np.float32(rounded * scale))
    high = _round(bits, np.uint32(0x7FFF), np.uint32(1), np.uint32(0xFFFF0000))
    sign = np.uint32(_fp32_bits(x) & np.uint32(0x80000000))
    return np.uint16(np.uint32(high | sign) >> np.uint32(16))


@jit()
def _through(x, out, scale, reciprocal, half, odd, keep):
    """A row of one block; which quotient: `kernels._encode`."""
    if reciprocal > np.float32(0.0):
        for c in range(x.size):
            value = _magnitude(x[c], half, odd, keep)
            out[c] = _value(np.float32(value * reciprocal), scale, x[c])
    elif reciprocal < np.float32(0.0):
        for c in range(x.size):
            value = _magnitude(x[c], half, odd, keep)
            quotient = np.float32(value * -reciprocal)
            remainder = fma(np.float32(-quotient), scale, value)
            out[c] = _value(fma(remainder, -reciprocal, quotient), scale, x[c])
    else:
        for c in range(x.size):
            value = _magnitude(x[c], half, odd, keep)
            out[c] = _value(value / scale, scale, x[c])


@jit()
def _as_it_is(x, out):
    """A row of a block that is not finite, in BF16."""
    for c in range(x.size):
        bits = np.uint32(_fp32_bits(x[c]))
        if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            bits |= np.uint32(0x00400000)  # a NaN stays one without its low bits
        else:
            bits = _round(bits, np.uint32(0x7FFF), np.uint32(1), np.uint32(0xFFFF0000))
        out[c] = np.uint16(bits >> np.uint32(16))


@jit()
def _through_tiles(
    source, out, cols, block_n, block_k, strip, half, odd, keep, pow2_scale, row_start, row_stop
):
    """Whole rows of blocks; a strip of at most `strip` blocks is read for its amax, then again."""
    blocks = (cols + block_k - 1) // block_k
    amaxes = np.empty(strip, np.uint32)
    for row in range(row_start, row_stop, block_n):
        stop = min(row + block_n, row_stop)
        for first in range(0, blocks, strip):
            count = min(strip, blocks - first)
            amaxes[:] = 0
            for r in range(row, stop):
                for i in range(count):
                    start = r * cols + (first + i) * block_k
                    width = min(block_k, cols - (first + i) * block_k)
                    amaxes[i] = _amax(source[start : start + width], amaxes[i])
            for r in range(row, stop):
                for i in range(count):
                    start = r * cols + (first + i) * block_k
                    width = min(block_k, cols - (first + i) * block_k)
                    x, to = source[start : start + width], out[start : start + width]
                    amax = _round(amaxes[i], half, odd, keep)
                    if amax < np.uint32(0x7F800000):
                        scale = _scale(amax, pow2_scale)
                        reciprocal = _reciprocal(amax, scale, keep, pow2_scale)
                        _through(x, to, scale, reciprocal, half, odd, keep)
                    else:
                        _as_it_is(x, to)


@jit()
def through_region(
    source, wide, out, rows, cols, block_n, block_k, strip, half, odd, keep, pow2_scale,
    row_start, row_stop,
):  # fmt: skip
    """`_through_tiles` of a contiguous matrix, given by addresses; `wide` says that it is FP32."""
    to = numba.carray(pointer(out), (rows * cols,), np.uint16)
    if wide:
        x32 = numba.carray(pointer(source), (rows * cols,), np.uint32)
        _through_tiles(
            x32, to, cols, block_n, block_k, strip, half, odd, keep, pow2_scale, row_start, row_stop
        )
    else:
        x16 = numba.carray(pointer(source), (rows * cols,), np.uint16)
        _through_tiles(
            x16, to, cols, block_n, block_k, strip, half, odd, keep, pow2_scale, row_start, row_stop
        )
