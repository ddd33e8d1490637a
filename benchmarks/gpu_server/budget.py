"""A bound for the whole run: what does not fit any more is skipped, with the reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Budget:
    """Seconds that a run may take.

    Attributes:
        total: from construction on.
        skipped: what was not run, each with its reason.
    """

    total: float
    clock: Callable[[], float] = time.monotonic
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def left(self) -> float:
        return max(0.0, self.total - (self.clock() - self._began))

    def allows(self, what: str, seconds: float) -> bool:
        """Whether `seconds` more fit; if not, `what` is noted as skipped."""
        left = self.left()
        if seconds <= left:
            return True
        self.skipped.append(
            f"{what}: takes about {seconds:.0f} s and {left:.0f} s of the budget of "
            f"{self.total:.0f} s are left; give more with --budget-s"
        )
        return False
