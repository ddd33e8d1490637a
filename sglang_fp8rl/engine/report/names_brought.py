"""Which call brought each name last."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...errors import RefitError
from .stamps import NEVER, Stamps

MAX_NAMES = 1 << 20  # ten times what the largest checkpoints have


class NamesBrought:
    """Names go by number, so that a bucket that was seen before costs one lookup in an array.

    Attributes:
        stamps: of the calls, by number.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self.stamps = Stamps()

    def numbers_of(self, names: Iterable[str]) -> np.ndarray:
        """A number for each name; it stays the same."""
        numbers = self._numbers
        found = []
        for name in names:
            if len(numbers) >= MAX_NAMES and name not in numbers:
                raise RefitError(
                    name,
                    f"a new name behind {MAX_NAMES} others",
                    "each refit brings the same names, those of the checkpoint",
                    "Look at what the trainer calls its tensors; a server that is started anew forgets them.",
                )
            number = numbers.setdefault(name, len(numbers))
            if number == len(self._names):
                self._names.append(name)
            found.append(number)
        if len(numbers) > len(self.stamps.of):
            self.stamps.grow(2 * len(numbers))
        return np.array(found, np.int64)

    def bring(self, numbers: np.ndarray, stamp: int) -> None:
        """These names came in the call of that stamp, which is larger than any before."""
        self.stamps.of[numbers] = stamp

    def repeated(self, numbers: np.ndarray, since: int) -> str | None:
        """The first of these names that came at that stamp or later."""
        came = self.stamps.of[numbers] >= since
        return self._names[numbers[int(came.argmax())]] if came.any() else None

    def latest(self, numbers: np.ndarray) -> int:
        """The stamp of the last call that brought any of these names."""
        return int(self.stamps.of[numbers].max(initial=NEVER))

    def not_brought(self, names: Iterable[str], since: int) -> list[str]:
        """Those of `names` that did not come at that stamp or later."""
        names = list(names)
        came = self.stamps.of[self.numbers_of(names)] >= since
        return [name for name, has_come in zip(names, came.tolist(), strict=True) if not has_come]
