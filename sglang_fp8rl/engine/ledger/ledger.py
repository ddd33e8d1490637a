"""What is known of every call: what came in it, and which parts of which parameters it wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..interception import Region
from ..model.landings import NameTable
from ..model.parameters import Target
from .coverage import CoverageTable
from .sent_twice import SentTwice


class Arrived(NamedTuple):
    """What one call brought.

    Attributes:
        tensors: how many were sent.
        nbytes: that came.
        has_taken: whether any of it reached a parameter.
        narrowed: names of what came with fewer bits than it is served with: BF16 for an FP32 parameter.
        numbers: of all names, from whoever counts them; the same for each bucket of one layout.
        stamp: its number among all calls, once it has ended.
        seconds: that it took.
        has_waited: whether it did not ask for the flush.
    """

    tensors: int = 0
    nbytes: int = 0
    has_taken: bool = False
    narrowed: tuple[str, ...] = ()
    numbers: Any = None
    stamp: int = -1
    seconds: float = 0.0
    has_waited: bool = False


NOTHING = Arrived()


class Ledger:
    """The facts of one model, cheap on the way. What follows from them is said elsewhere.

    Attributes:
        targets: every parameter.
        names: that the model takes.
        stamp: of the call that runs; calls are counted from 0, refused ones too.
        coverage: when each part of a parameter came last.
        sent_twice: what came for a parameter which another tensor writes.
    """

    def __init__(self, targets: Iterable[Target], names: NameTable) -> None:
        self.targets, self.names, self.stamp = list(targets), names, -1
        self.coverage = CoverageTable([tuple(target.parameter.shape) for target in self.targets])
        self.sent_twice = SentTwice()

    def write(self, target: Target, region: Region | None) -> int | None:
        """The call that runs wrote there. Returns the number of the box; None for what is no box."""
        return self.coverage.write_one(target.index, region, self.stamp)

    def written(self) -> list[str]:
        """The parameters of which the call that runs wrote any."""
        return [self.targets[at].name for at in self.coverage.reached_in(self.stamp)]
