"""Sums over prompts, and which prompts have a say in the choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
        order: dict[tuple[int, ...], int] = {}
        self._prompts = [order.setdefault(sample.prompt, len(order)) for sample in samples]
        self._tokens = [sample.tokens for sample in samples]
        self.all = set(order.values())
        self.held_out = {number for number in self.all if number % HELD_OUT == HELD_OUT - 1}
        self.chosen_on = self.all - self.held_out

    def tokens(self, prompts: set[int]) -> int:
        return int(self._by_prompt(self._tokens, prompts).sum())

    def per_token(self, kl: Sequence[float], prompts: set[int]) -> Measured:
        """Of a sum per sample: over these prompts, per token."""
        return self.share(kl, self._tokens, prompts)

    def share(self, part: Sequence[float], whole: Sequence[float], prompts: set[int]) -> Measured:
        return ratio(self._by_prompt(part, prompts), self._by_prompt(whole, prompts))

    def _by_prompt(self, values: Sequence[float], prompts: set[int]) -> np.ndarray:
        """Sums of per-sample values, for each of these prompts in order."""
        return np.bincount(self._prompts, weights=values)[sorted(prompts)]


def ratio(part: Sequence[float] | np.ndarray, whole: Sequence[float] | np.ndarray) -> Measured:
    """Sum over sum; the error of a ratio estimator (Cochran 1977, section 6.3). NaN for one prompt."""
    parts, wholes = np.asarray(part), np.asarray(whole)
    total, count = float(wholes.sum()), len(parts)
    value = float(parts.sum()) / total if total else math.nan
    if count < 2:
        return Measured(value, math.nan)
    squares = float(np.square(parts - value * wholes).sum())
    return Measured(value, math.sqrt(squares * count / (count - 1)) / total)
