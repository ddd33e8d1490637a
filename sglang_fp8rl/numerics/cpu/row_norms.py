"""Row norms of e4m3 codes (`numerics/kv_bounds.py`) on a CPU: one read of the codes, nothing of their size.

torch converts e4m3 an element at a time. Here the bits of a normal code, without its sign, move to where
FP32 has them and get its exponent bias; a subnormal code is a number of steps. So no FP32 subnormal is
made, which a process may be told to take for zero.

What multiplies a code is the same for the rows that share a scale, so it is made once for them: the loop
over a row has no group, and its sums leave the vector registers once.
"""

# Numba reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numba
import numpy as np
import torch

from .jit import jit, pointer

_MAGNITUDE, _NORMAL, _UP = (np.uint32(n) for n in (0x7F, 8, 20))
_BIAS = np.uint32((127 - 7) << 23)
_STEP = np.float32(2.0**-9)
_MAGNITUDE_BYTE = _NAN = np.uint8(0x7F)
# A factor is this much of the largest, or more: with the smallest code its product is a normal FP32 number.
_LEAST = 2.0**-100
_TINY = 2.0**-1000
# Sums in another order than written, so that they become vector instructions; one order for good.
_compiled = jit(fastmath=("reassoc", "contract"))


def row_norms(
    codes: torch.Tensor,
    scales: torch.Tensor,
    share: int,
    gain: torch.Tensor,
    largest: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`|w * s * g|_2` and `|w * s * G|_2` of each row, with `G` the largest gain of a group of columns.

    Sums are FP32, of numbers that are not negative: off by a factor of `1 + K * 2**-24` at most, before
    the root. A factor `(s * g)**2` below 2**-100 of its row's largest counts as that much. The numbers
    of a row depend on no row with other scales.

    Args:
        codes: e4m3 `[R, K]`, rows contiguous.
        scales: FP64 `[ceil(R / share), groups]`.
        share: how many rows have the same scales.
        gain: FP64 `[K]`, not negative.
        largest: FP64 `[groups]`.

    Returns:
        FP64 `[R]` each; NaN where a code, a scale or a gain is, or is not finite.
    """
    found = np.empty((2, len(codes)), np.float64)
    arrays = [one.contiguous().numpy() for one in (scales, gain, largest)]
    _row_norms(codes.data_ptr(), codes.stride(0), share, *arrays, found)
    return torch.from_numpy(found[0]), torch.from_numpy(found[1])


@_compiled
def _row_norms(address, stride, share, scales, gain, largest, found):
    columns, rows, groups = len(gain), found.shape[1], len(largest)
    width = columns // groups
    exact, bounding = np.empty(columns, np.float32), np.empty(columns, np.float32)
    for block in range(len(scales)):
        of_exact, of_bounding = _TINY, _TINY
        for group in range(groups):
            scale = scales[block, group]
            for column in range(group * width, group * width + width):
                factor = gain[column] * scale
                of_exact = factor if factor > of_exact else of_exact
            factor = largest[group] * scale
            of_bounding = factor if factor > of_bounding else of_bounding
        for group in range(groups):
            scale = scales[block, group]
            for column in range(group * width, group * width + width):
                exact[column] = _square(gain[column] * scale / of_exact)
                bounding[column] = _square(largest[group] * scale / of_bounding)
        for row in range(block * share, min(block * share + share, rows)):
            a, b = _sums(address + row * stride, exact, bounding)
            found[0, row] = of_exact * np.sqrt(np.float64(a))
            found[1, row] = of_bounding * np.sqrt(np.float64(b))


@_compiled
def _square(factor):
    square = factor * factor
    return np.float32(_LEAST if square < _LEAST else square)  # NaN stays NaN


@_compiled
def _sums(address, exact, bounding):
    columns = len(exact)
    codes = numba.carray(pointer(address), (columns,), np.uint8)
    highest = np.uint8(0)
    for column in range(columns):
        highest = max(highest, np.uint8(codes[column] & _MAGNITUDE_BYTE))
    if highest == _NAN:
        return np.float32(np.nan), np.float32(np.nan)
    a, b = np.float32(0), np.float32(0)
    for column in range(columns):
        magnitude = np.uint32(codes[column]) & _MAGNITUDE
        normal = np.uint32(np.uint32(magnitude << _UP) + _BIAS).view(np.float32)
        value = normal if magnitude >= _NORMAL else np.float32(magnitude) * _STEP
        square = value * value
        a += square * exact[column]
        b += square * bounding[column]
    return a, b
