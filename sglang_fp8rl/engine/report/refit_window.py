"""Which calls make up the current refit, for clients that never say where one begins."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_NEVER = -1


class RefitWindow:
    """A refit is a run of calls in which no tensor comes twice.

    A call that repeats a tensor starts behind the last call that had it, and anew if every weight
    had been written; what else comes after the last weight (norms, the head) still belongs to that
    refit. A refit may span sessions: what one left out the next may bring. A tensor that failed does
    not count as sent, so sending it again mends the refit instead of ending it.

    Names go by number (`numbers_of`), so that a bucket that was seen before costs one lookup in an
    array.

    Attributes:
        start: the first call of the current refit.
        call: the current call; calls count from 1.
        is_complete: whether every weight has been written since `start`.
    """

    def __init__(self) -> None:
        self.start = 0
        self.call = 0
        self.is_complete = False
        self._numbers: dict[str, int] = {}
        self._last_call = np.empty(0, np.int64)

    def numbers_of(self, names: Iterable[str]) -> np.ndarray:
        """A number for each name; it stays the same."""
        numbers = self._numbers
        found = [numbers.setdefault(name, len(numbers)) for name in names]
        missing = len(numbers) - len(self._last_call)
        if missing > 0:
            more = np.full(max(missing, len(numbers)), _NEVER, np.int64)
            self._last_call = np.concatenate([self._last_call, more])
        return np.array(found, np.int64)

    def begin_call(self, sent: np.ndarray) -> bool:
        """Count one call; `sent` is empty where what comes is not known (a checkpoint).

        Returns whether it starts another refit than the call before it.
        """
        self.call += 1
        latest = int(self._last_call[sent].max()) if len(sent) else _NEVER
        repeats = len(sent) > 0 and latest >= self.start
        is_anew = not len(sent) or (self.is_complete and repeats)
        start = max(self.call if is_anew else self.start, latest + 1)
        is_new = start != self.start
        self.start, self.is_complete = start, False
        return is_new

    def restart(self) -> None:
        """The next call starts a refit, whatever it brings."""
        self.start, self.is_complete = self.call + 1, False

    def stored(self, names: np.ndarray) -> None:
        """What this call stored."""
        self._last_call[names] = self.call
