"""When things were written last: an array of stamps, larger ones later."""

from __future__ import annotations

import numpy as np

NEVER = -1


class Stamps:
    """Stamps of numbered things.

    Attributes:
        of: int64, `NEVER` where nobody wrote. Written by its owner.
    """

    def __init__(self, count: int = 0) -> None:
        self.of = np.full(count, NEVER, np.int64)

    def grow(self, count: int) -> None:
        """There are so many things now; the new ones were never written."""
        self.of = np.concatenate([self.of, np.full(count - len(self.of), NEVER, np.int64)])

    def forget(self) -> None:
        """Nothing is written any more."""
        self.of[:] = NEVER
