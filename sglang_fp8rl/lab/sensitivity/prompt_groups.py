"""Sums over prompts, and which prompts have a say in the choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .samples import Sample

# Every so many prompts one has no say in the choice, and is what the choice is checked on.
HELD_OUT = 4


@dataclass(frozen=True)
class Measured:
    """A ratio of two sums over prompts, with its standard error (linearized, clustered by prompt)."""

    value: float
    error: float


class Groups:
    """Which samples have a say in the choice, and which it is checked on: whole prompts."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._tokens = [sample.tokens for sample in samples]
        order: dict[tuple[int, ...], int] = {}
        for sample in samples:
            order.setdefault(sample.prompt, len(order))
        self._prompts = [order[sample.prompt] for sample in samples]
        self.held_out = {number for number in order.values() if number % HELD_OUT == HELD_OUT - 1}
        self.chosen_on = set(order.values()) - self.held_out

    @property
    def all(self) -> set[int]:
        return self.held_out | self.chosen_on

    def tokens(self, prompts: set[int]) -> int:
        return sum(self.by_prompt(self._tokens, prompts))

    def by_prompt(self, values: Sequence[float], prompts: set[int]) -> list[Any]:
        """Sums of per-sample values, for each of these prompts in order."""
        sums = dict.fromkeys(sorted(prompts), 0)
        for prompt, value in zip(self._prompts, values, strict=True):
            if prompt in sums:
                sums[prompt] += value  # type: ignore[assignment]
        return list(sums.values())

    def per_token(self, kl: Sequence[float], prompts: set[int]) -> Measured:
        return ratio(self.by_prompt(kl, prompts), self.by_prompt(self._tokens, prompts))

    def share(self, part: Sequence[float], whole: Sequence[float], prompts: set[int]) -> Measured:
        return ratio(self.by_prompt(part, prompts), self.by_prompt(whole, prompts))


def ratio(part: Sequence[float], whole: Sequence[float]) -> Measured:
    """Sum over sum; the error of a ratio estimator (Cochran 1977, section 6.3). NaN for one prompt."""
    value = sum(part) / sum(whole) if sum(whole) else math.nan
    count = len(part)
    if count < 2:
        return Measured(value, math.nan)
    squares = sum((one - value * other) ** 2 for one, other in zip(part, whole, strict=True))
    return Measured(value, math.sqrt(squares * count / (count - 1)) / sum(whole))
