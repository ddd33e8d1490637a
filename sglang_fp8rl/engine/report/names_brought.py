"""Which call brought each name last."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_NEVER = -1


class NamesBrought:
    """Names go by number, so that a bucket that was seen before costs one lookup in an array."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._stamp = np.empty(0, np.int64)

    def numbers_of(self, names: Iterable[str]) -> np.ndarray:
        """A number for each name; it stays the same."""
        numbers = self._numbers
        found = []
        for name in names:
            number = numbers.setdefault(name, len(numbers))
            if number == len(self._names):
                self._names.append(name)
            found.append(number)
        missing = len(numbers) - len(self._stamp)
        if missing > 0:
            more = np.full(max(missing, len(numbers)), _NEVER, np.int64)
            self._stamp = np.concatenate([self._stamp, more])
        return np.array(found, np.int64)

    def bring(self, numbers: np.ndarray, stamp: int) -> None:
        """These names came in the call of that stamp, which is larger than any before."""
        self._stamp[numbers] = stamp

    def repeated(self, numbers: np.ndarray, since: int) -> str | None:
        """The first of these names that came at that stamp or later."""
        came = self._stamp[numbers] >= since
        return self._names[numbers[int(came.argmax())]] if came.any() else None

    def latest(self, numbers: np.ndarray) -> int:
        """The stamp of the last call that brought any of these names."""
        return int(self._stamp[numbers].max(initial=_NEVER))

    def not_brought(self, names: Iterable[str], since: int) -> list[str]:
        """Those of `names` that did not come at that stamp or later."""
        names = list(names)
        came = self._stamp[self.numbers_of(names)] >= since
        return [name for name, has_come in zip(names, came.tolist(), strict=True) if not has_come]

    def restamp(self, since: int, by: int) -> None:
        """Add `by` to all stamps from `since` on."""
        self._stamp[self._stamp >= since] += by
