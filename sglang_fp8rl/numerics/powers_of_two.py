"""Multiplying tensors by powers of two without losing a bit, and how far that goes.

A power of two changes the exponent of a BF16 or FP32 number and nothing else, as long as the number
stays normal and finite. Then the product with its inverse is the identity, by bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# BF16 and FP32 have the same exponents.
SMALLEST_NORMAL, LARGEST = -126, 127
UNLIMITED = 1 << 20
EXACT_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class ExponentRange:
    """The exponents `e` for which multiplying by `2**e` loses nothing; 0 is always one of them."""

    low: int = -UNLIMITED
    high: int = UNLIMITED

    def __and__(self, other: ExponentRange) -> ExponentRange:
        return ExponentRange(max(self.low, other.low), min(self.high, other.high))

    def __neg__(self) -> ExponentRange:
        """Of the inverse: the exponents whose negatives are in this range."""
        return ExponentRange(-self.high, -self.low)

    def nearest(self, exponent: int) -> int:
        return min(max(exponent, self.low), self.high)


def magnitudes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Smallest magnitude that is not zero, and largest, over all of them: FP32 `[2]`, on their device.

    `[inf, 0]` where all are zero or there are none; NaN where one has a NaN.
    """
    low, high = [], []
    for one in tensors:
        if one.numel():
            magnitude = one.detach().float().abs()
            high.append(magnitude.amax())
            low.append(magnitude.masked_fill(magnitude == 0, math.inf).amin())
    if not low:
        return torch.tensor([math.inf, 0.0])
    return torch.stack([torch.stack(low).amin(), torch.stack(high).amax()])


def exact_range(smallest: float, largest: float) -> ExponentRange:
    """How far numbers of these magnitudes can be moved (`magnitudes`).

    A subnormal has fewer bits than it would need one binade lower, so it may only move up. What is not
    finite does not move at all.
    """
    if largest == 0:
        return ExponentRange()
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        return ExponentRange(0, 0)
    least, most = math.frexp(smallest)[1] - 1, math.frexp(largest)[1] - 1
    low = min(SMALLEST_NORMAL - least, 0) if least >= SMALLEST_NORMAL else 0
    return ExponentRange(low, max(LARGEST - most, 0))


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
