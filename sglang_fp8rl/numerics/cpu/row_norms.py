"""Row norms of e4m3 codes (`numerics/kv_bounds.py`) on a CPU: one read of the codes, nothing of their size.

torch converts e4m3 an element at a time; here the square of a code is looked up.
"""

from __future__ import annotations

import numpy as np
import torch

from .jit import jit

_SQUARES = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().square().numpy()
# A squared factor is this much of the largest, or more: with the smallest code's square its product is a
# normal FP32 number. A process may be told to take any smaller one for zero.
_LEAST = 2.0**-100


def row_norms(
    codes: torch.Tensor, scales: torch.Tensor, gains: torch.Tensor, share: int
) -> torch.Tensor:
    """`|w * f|_2` of each row, for two factors `f` that are a scale times a gain.

    Sums are FP32, of numbers that are not negative: off by a factor of `1 + K * 2**-24` at most, before
    the root. A square of a factor below 2**-100 of its row's largest counts as that much. The numbers
    of a row depend on no row with other scales.

    Args:
        codes: e4m3 `[R, K]`.
        scales: FP64 `[ceil(R / share), groups of columns]`, not negative.
        gains: FP64 `[2, K]`, not negative.
        share: how many rows have the same scales.

    Returns:
        FP64 `[2, R]`; NaN where a code, a scale or a gain is, or is not finite.
    """
    # Not in torch: its threads would wait for each other longer than all of this takes.
    of_columns = np.repeat(scales.numpy(), codes.shape[1] // scales.shape[1], 1)
    factors = of_columns * gains.numpy()[:, None]  # [2, R / share, K]
    top = np.maximum(factors.max(2, keepdims=True), 2.0**-1000)
    with np.errstate(invalid="ignore"):  # what is infinite becomes NaN
        weights = np.maximum((factors / top) ** 2, _LEAST).astype(np.float32)
    sums = np.empty((2, len(codes)), np.float32)
    _weighted_sums(codes.view(torch.uint8).contiguous().numpy(), _SQUARES, weights, share, sums)
    of_row = np.repeat(top[..., 0], share, 1)[:, : len(codes)]
    return torch.from_numpy(of_row * np.sqrt(sums.astype(np.float64)))


# Sums in another order than written, so that they become vector instructions; one order for good.
@jit(fastmath=("reassoc", "contract"))
def _weighted_sums(codes, squares, weights, share, sums):
    for row in range(len(codes)):
        line, exact, bounding = codes[row], weights[0, row // share], weights[1, row // share]
        a, b = np.float32(0), np.float32(0)
        for column in range(len(line)):
            square = squares[line[column]]
            a += square * exact[column]
            b += square * bounding[column]
        sums[0, row], sums[1, row] = a, b
