"""Which refit brought each name last."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_NEVER = -1


class NamesBrought:
    """Names go by number, so that a bucket that was seen before costs one lookup in an array."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._refit = np.empty(0, np.int64)

    def numbers_of(self, names: Iterable[str]) -> np.ndarray:
        """A number for each name; it stays the same."""
        numbers = self._numbers
        found = []
        for name in names:
            number = numbers.setdefault(name, len(numbers))
            if number == len(self._names):
                self._names.append(name)
            found.append(number)
        missing = len(numbers) - len(self._refit)
        if missing > 0:
            more = np.full(max(missing, len(numbers)), _NEVER, np.int64)
            self._refit = np.concatenate([self._refit, more])
        return np.array(found, np.int64)

    def bring(self, numbers: np.ndarray, refit: int) -> None:
        self._refit[numbers] = refit

    def repeated(self, numbers: np.ndarray, refit: int) -> str | None:
        """The first of these names that came in that refit already."""
        came = self._refit[numbers] == refit
        return self._names[numbers[int(came.argmax())]] if came.any() else None

    def not_brought(self, names: Iterable[str], refit: int) -> list[str]:
        """Those of `names` that did not come in that refit."""
        names = list(names)
        came = self._refit[self.numbers_of(names)] == refit
        return [name for name, has_come in zip(names, came.tolist(), strict=True) if not has_come]
