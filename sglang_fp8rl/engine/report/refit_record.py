"""One refit: what came, how it ended, and the words for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ...wire.refit_note import RefitNote
from ..arrival.update_scope import Origin
from .noise import Noise


class Outcome(str, Enum):
    """How a refit ended."""

    OPEN = "open"
    OK = "ok"
    MIXED = "mixed"
    FAILED = "failed"


class State(str, Enum):
    """What is served."""

    WHOLE = "whole"
    OPEN = "open"
    MIXED = "mixed"
    UNLOADED = "unloaded"
    FAILED = "failed"


@dataclass(frozen=True)
class Verdict:
    """What one rank, or all of them, found at the end of a refit (or where it might be one).

    Attributes:
        is_complete: every parameter came in it.
        lacking: parameters that did not, and `names`: examples of what would have brought them.
        failures: why it can't be `ok`, whatever came.
        has_taken: whether any tensor reached a parameter.
    """

    is_complete: bool
    lacking: int = 0
    names: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    has_taken: bool = True

    @staticmethod
    def of_all(ranks: Sequence[Verdict]) -> Verdict:
        """Complete means complete on every rank."""
        return Verdict(
            is_complete=all(one.is_complete for one in ranks),
            lacking=max(one.lacking for one in ranks),
            names=next((one.names for one in ranks if one.names), ()),
            failures=tuple(dict.fromkeys(text for one in ranks for text in one.failures)),
            has_taken=any(one.has_taken for one in ranks),
        )


@dataclass
class Session:
    """What a client opened with `begin_weight_update`.

    Attributes:
        note: that came with it.
        failed: the refit in it that failed and had no successor.
    """

    note: RefitNote | None = None
    failed: Refit | None = None


@dataclass
class Refit:
    """One refit: what came, and how it ended.

    Attributes:
        id: counts from 1, the same on every rank.
        note: what the client says of it.
        session: that it belongs to.
        senders: of its calls, where they can be told; `ousted`: those that it took over from.
        has_waited: whether a call of it did not ask for the flush.
        has_taken: whether any of its tensors reached a parameter.
        given_up: why it ended, if nobody ended it.
        numbers: of the names that came, call by call.
        layout: sum of the `layout_number`s of what came, if the note has a digest.
        cache_flushed: whether SGLang flushed its cache behind it; None if it was not asked to.
    """

    id: int
    origin: Origin
    note: RefitNote | None = None
    version: str | None = None
    session: Session | None = None
    senders: set[str] = field(default_factory=set)
    ousted: set[str] = field(default_factory=set)
    has_waited: bool = False
    has_taken: bool = False
    outcome: Outcome = Outcome.OPEN
    is_complete: bool = False
    lacking: int = 0
    lacking_names: tuple[str, ...] = ()
    errors: list[str] = field(default_factory=list)
    given_up: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    calls: int = 0
    numbers: list[np.ndarray] = field(default_factory=list)
    layout: int = 0
    noise: Noise = field(default_factory=Noise)
    cache_flushed: bool | None = None

    @property
    def tensors(self) -> int:
        return len(np.unique(np.concatenate(self.numbers))) if self.numbers else 0

    @property
    def is_partial(self) -> bool:
        return self.note is not None and self.note.is_partial

    @property
    def wants_layout(self) -> bool:
        """Whether the client sent a digest of what it announced."""
        return self.note is not None and self.note.digest is not None

    def describe(self) -> str:
        """For a message."""
        version = f" ({self.version})" if self.version else ""
        return f"refit {self.id}{version}" + (f", {self.given_up}:" if self.given_up else "")

    def left_out(self) -> str:
        """For a message."""
        return left_out(self.lacking, self.lacking_names)


def left_out(lacking: int, names: Sequence[str]) -> str:
    """For a message.

    Args:
        names: examples of what would have brought the parameters that are lacking.
    """
    return (
        f"it left out {lacking} parameter(s): {', '.join(names)}"
        + (" and more" if len(names) < lacking else "")
        + ". Send the update again, whole, or declare it partial if they are still right"
    )
