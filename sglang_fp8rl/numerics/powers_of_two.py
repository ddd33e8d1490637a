"""Multiplying tensors by powers of two without losing a bit, and how far that goes.

A power of two changes the exponent of a BF16 or FP32 number and nothing else, as long as the number
stays normal and finite. Then the product with its inverse is the identity, by bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# BF16 and FP32 have the same exponents.
SMALLEST_NORMAL, LARGEST = -126, 127


def magnitudes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Smallest magnitude that is not zero, and largest, over all of them: FP32 `[2]`, on their device.

    `[inf, 0]` where all are zero; NaN where one has a NaN.
    """
    found = torch.cat([one.detach().float().abs().flatten() for one in tensors])
    return torch.stack([found.masked_fill(found == 0, math.inf).amin(), found.amax()])


def exact_range(smallest: float, largest: float) -> tuple[int, int]:
    """The lowest and the highest `e` with which numbers of these `magnitudes` times `2**e` lose nothing.

    0 always lies between. A subnormal has fewer bits than it would need one binade lower, so it may only
    move up. What is not finite does not move at all.
    """
    if largest == 0:
        return SMALLEST_NORMAL, -SMALLEST_NORMAL
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        return 0, 0
    least, most = math.frexp(smallest)[1] - 1, math.frexp(largest)[1] - 1
    low = min(SMALLEST_NORMAL - least, 0) if least >= SMALLEST_NORMAL else 0
    return low, max(LARGEST - most, 0)


def multiply_by_powers(tensors: Sequence[torch.Tensor], exponents: Sequence[int]) -> None:
    """`tensor *= 2**exponent` for each, in place; exact within `exact_range`.

    Args:
        tensors: BF16 or FP32, views included.
        exponents: one for each; at most 126 in magnitude.
    """
    moved = [(one, e) for one, e in zip(tensors, exponents, strict=True) if e]
    if moved:
        torch._foreach_mul_([one for one, _ in moved], [math.ldexp(1.0, e) for _, e in moved])


def smallest_exponent(bound: float, limit: float) -> int:
    """The smallest `e` with `bound <= limit * 2**e`, both positive and finite. No rounding in it."""
    fraction_of_bound, of_bound = math.frexp(bound)
    fraction_of_limit, of_limit = math.frexp(limit)
    return of_bound - of_limit + (fraction_of_bound > fraction_of_limit)
