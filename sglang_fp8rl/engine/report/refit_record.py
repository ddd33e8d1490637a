"""One refit: what came, how it ended, and the words for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ...wire.refit_note import RefitNote
from ..arrival.update_scope import Origin
from .noise import Noise

ALONE = (Origin.DISK, Origin.STARTUP)  # one request is one refit
_CALL_BITS = 20  # of a stamp: the call's place in its refit; above them is the refit's id


def refit_of_stamp(stamps: np.ndarray) -> np.ndarray:
    """Ids of the refits that wrote with these stamps. Int64, negative where nobody did."""
    return stamps >> _CALL_BITS


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


@dataclass(frozen=True)
class Part:
    """One call of a refit.

    Attributes:
        numbers: of the names that came.
        has_taken: whether any of its tensors reached a parameter.
        has_waited: whether it did not ask for the flush.
        sender: that it came from, where that can be told.
        layout: sum of the `layout_number`s of what came, if the note has a digest.
    """

    numbers: np.ndarray
    nbytes: int
    seconds: float
    has_taken: bool
    has_waited: bool
    sender: str | None
    layout: int = 0


@dataclass
class Refit:
    """One refit: what came, and how it ended.

    Attributes:
        id: counts from 1, the same on every rank.
        note: what the client says of it.
        session: that it belongs to.
        ousted: senders that it took over from.
        parts: its calls, in order; `add` takes one more.
        has_waited: whether a call of it did not ask for the flush.
        given_up: why it ended, if nobody ended it.
        cache_flushed: whether SGLang flushed its cache behind it; None if it was not asked to.
    """

    id: int
    origin: Origin
    note: RefitNote | None = None
    version: str | None = None
    session: Session | None = None
    ousted: set[str] = field(default_factory=set)
    parts: list[Part] = field(default_factory=list)
    has_waited: bool = False
    outcome: Outcome = Outcome.OPEN
    is_complete: bool = False
    lacking: int = 0
    lacking_names: tuple[str, ...] = ()
    errors: list[str] = field(default_factory=list)
    given_up: str = ""
    noise: Noise = field(default_factory=Noise)
    cache_flushed: bool | None = None

    @property
    def since(self) -> int:
        """The stamp of its first call: a larger one is of it, or of a later refit."""
        return self.id << _CALL_BITS

    @property
    def stamp(self) -> int:
        """Of what its next call writes: larger than that of anything written before."""
        return self.since + min(len(self.parts), (1 << _CALL_BITS) - 1)

    def add(self, *parts: Part) -> None:
        """These calls came."""
        self.parts += parts
        self.has_waited = self.has_waited or any(part.has_waited for part in parts)

    def parted(self, latest: int, sender: str | None) -> list[Part]:
        """Its calls behind the one of stamp `latest`, which it loses, if they are of that sender's refit:
        all of its own, or all of clients that had no part in what came before.

        Nothing of a session, or of a refit with a name: what is sent there is of one client and one refit.
        """
        at = latest - self.since + 1
        before, kept = self.parts[:at], self.parts[at:]
        senders = {sender, *(part.sender for part in kept)}
        is_one = len(senders) == 1 or senders.isdisjoint(part.sender for part in before)
        if not (self.is_bare and is_one):
            return []
        self.parts, self.has_waited = [], False
        self.add(*before)
        return kept

    def sender_of(self, stamp: int) -> str | None:
        """Of the call of that stamp."""
        return self.parts[min(stamp - self.since, len(self.parts) - 1)].sender

    @property
    def has_taken(self) -> bool:
        """Whether any of its tensors reached a parameter."""
        return any(part.has_taken for part in self.parts)

    @property
    def senders(self) -> set[str]:
        """Of its calls, where they can be told."""
        return {part.sender for part in self.parts if part.sender is not None}

    @property
    def is_bare(self) -> bool:
        """Whether nothing but its calls tells where it begins: no session, no name, no checkpoint."""
        return self.session is None and self.note is None and self.origin not in ALONE

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def layout(self) -> int:
        return sum(part.layout for part in self.parts)

    @property
    def tensors(self) -> int:
        parts = [part.numbers for part in self.parts]
        return len(np.unique(np.concatenate(parts))) if parts else 0

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
