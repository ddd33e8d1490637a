"""Row energies of e4m3 codes (`numerics/kv_bounds.py`) on a CPU: one read of the codes, nothing allocated.

torch converts e4m3 an element at a time. Here the bits of a normal code, without its sign, move to where
FP32 has them and get its exponent bias; a subnormal code is a number of steps. So no FP32 subnormal is
made, which a process may be told to take for zero.
"""

# Numba reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numba
import numpy as np
import torch

from .intrinsics import pointer

_CODES_PER_THREAD = 512 * 1024
_MAGNITUDE, _NAN, _NORMAL, _UP = (np.uint32(n) for n in (0x7F, 0x7F, 8, 20))
_BIAS = np.uint32((127 - 7) << 23)
_STEP = np.float32(2.0**-9)


def row_energies(
    codes: torch.Tensor, gain: torch.Tensor, width: int, threads: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of `(w * g)**2` and of `w**2` over groups of `width` columns.

    The numbers of a row depend on nothing beside it: neither on other rows nor on threads.

    Args:
        codes: e4m3 `[R, K]`, rows contiguous.
        gain: FP32 `[K]`, the squares of `g`.
        threads: at most this many; default `torch.get_num_threads()`.

    Returns:
        FP64 `[R, K / width]` each; NaN where a code is.
    """
    rows, columns = codes.shape
    found = np.empty((2, rows, columns // width), np.float64)
    gains = gain.contiguous().numpy()

    def work(first: int, end: int) -> None:
        address = codes.data_ptr() + first * codes.stride(0)
        _energies(address, codes.stride(0), end - first, gains, width, found[:, first:end])

    parts = min(threads or torch.get_num_threads(), 1 + codes.numel() // _CODES_PER_THREAD, rows)
    edges = [rows * part // parts for part in range(parts + 1)]
    if parts == 1:
        work(0, rows)
    else:
        # A pool per call: one that is kept would hang in a forked child.
        with ThreadPoolExecutor(parts - 1) as pool:
            others = [pool.submit(work, *pair) for pair in pairwise(edges[1:])]
            work(edges[0], edges[1])
            for other in others:
                other.result()
    return torch.from_numpy(found[0]), torch.from_numpy(found[1])


def _compiled(function):
    # Sums in another order than written, so that they become vector instructions; one order for good.
    options = {"nogil": True, "fastmath": {"reassoc", "contract"}, "boundscheck": False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "cannot cache function: no locator available"
        return numba.njit(**options)(function)


@_compiled
def _energies(address, stride, rows, gains, width, found):
    columns = len(gains)
    for row in range(rows):
        codes = numba.carray(pointer(address + row * stride), (columns,), np.uint8)
        for group in range(columns // width):
            behind_norm, plain = np.float32(0), np.float32(0)
            largest = np.uint32(0)
            for column in range(group * width, group * width + width):
                magnitude = np.uint32(codes[column]) & _MAGNITUDE
                largest = max(largest, magnitude)
                normal = np.uint32(np.uint32(magnitude << _UP) + _BIAS).view(np.float32)
                value = normal if magnitude >= _NORMAL else np.float32(magnitude) * _STEP
                square = value * value
                plain += square
                behind_norm += square * gains[column]
            if largest == _NAN:
                found[0, row, group] = found[1, row, group] = np.nan
            else:
                found[0, row, group] = behind_norm
                found[1, row, group] = plain
