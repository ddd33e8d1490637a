"""One refit: what came, how it ended, and the words for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain

from ...wire.refit_note import PARTIAL, RefitNote
from ...wire.stages import BETWEEN_REQUESTS, Mark, seconds_by_stage
from ..arrival.update import Origin
from ..ledger.ledger import Arrived


class Outcome(str, Enum):
    """How a refit ended."""

    OPEN = "open"
    OK = "ok"
    MIXED = "mixed"
    FAILED = "failed"


class State(str, Enum):
    """What is served, from the best to the worst."""

    WHOLE = "whole"
    OPEN = "open"
    MIXED = "mixed"
    UNLOADED = "unloaded"
    FAILED = "failed"


@dataclass(frozen=True)
class Verdict:
    """What one rank, or all of them, found at the end of a refit (or where it might be one).

    Attributes:
        lacking: parameters that did not come in it, and `names`: examples of what would have brought them.
        failures: why it can't be `ok`, whatever came.
        differing: what is wrong with tensors that came twice, if it ends here.
        has_taken: whether any tensor reached a parameter.
        has_waited: whether a call did not ask for the flush.
        is_of_one: whether all calls are known to be of one update.
    """

    lacking: int = 0
    names: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    has_taken: bool = True
    has_waited: bool = False
    is_of_one: bool = True

    @staticmethod
    def of_all(ranks: Sequence[Verdict]) -> Verdict:
        """Complete means complete on every rank."""
        return Verdict(
            lacking=max(one.lacking for one in ranks),
            names=next((one.names for one in ranks if one.names), ()),
            failures=_all(one.failures for one in ranks),
            differing=_all(one.differing for one in ranks),
            has_taken=any(one.has_taken for one in ranks),
            has_waited=any(one.has_waited for one in ranks),
            is_of_one=all(one.is_of_one for one in ranks),
        )

    @property
    def is_complete(self) -> bool:
        return not self.lacking

    def at_the_end(self) -> Verdict:
        """With what counts only where the refit ends."""
        return replace(self, failures=self.failures + self.differing, differing=())

    def left_out(self) -> str:
        """In words; also why a refit in which all came is not whole."""
        if self.is_complete:
            return (
                "all came, and nothing says that it is of one update. Open a session, name the refit, or flush "
                "the cache before the next one"
            )
        more = " and more" if len(self.names) < self.lacking else ""
        return (
            f"it left out {self.lacking} parameter(s): {', '.join(self.names)}{more}. "
            "Send the update again, whole, or declare it partial if they are still right"
        )


def _all(of_ranks: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Each text once."""
    return tuple(dict.fromkeys(chain.from_iterable(of_ranks)))


@dataclass
class Session:
    """What a client opened with `begin_weight_update`.

    Attributes:
        number: of the model's memory when it was opened; None where the note says what is to come.
        has_begun: whether a refit has.
        was_used: whether any request in it succeeded: of its refit, of one by another name, of a draft alone.
        was_loaded: whether one that updates the served model did.
        failed: the last refit in it that failed.
        given_up: the last one that was given up, until another one begins.
        version: that a draft's request in it said.
    """

    note: RefitNote | None = None
    number: int | None = None
    has_begun: bool = False
    was_used: bool = False
    was_loaded: bool = False
    failed: Refit | None = None
    given_up: Refit | None = None
    version: str | None = None


@dataclass(eq=False)
class Refit:
    """One refit: what came, and how it ended.

    Attributes:
        id: counts from 1, the same on every rank.
        since: stamp of its first call: a larger one is of it, or of a later refit.
        found: what all ranks said behind its last request; None before.
        given_up: why it ended, if nobody ended it.
        cache_flushed: whether SGLang flushed its cache behind it; None if it was not asked to.
        stages: seconds of each, from its first request to its last answer.
        answered_at: when that was.
    """

    id: int
    origin: Origin
    since: int
    note: RefitNote | None = None
    version: str | None = None
    session: Session | None = None
    calls: list[Arrived] = field(default_factory=list)
    found: Verdict | None = None
    outcome: Outcome = Outcome.OPEN
    errors: list[str] = field(default_factory=list)
    given_up: str = ""
    cache_flushed: bool | None = None
    stages: Counter[str] = field(default_factory=Counter)
    answered_at: float | None = None

    def add_stages(self, marks: list[Mark]) -> None:
        """One more of its requests, from its arrival to its answer, and the wait before it."""
        if self.answered_at is not None:
            marks = [(BETWEEN_REQUESTS, self.answered_at), *marks]
        self.stages.update(seconds_by_stage(marks))
        self.answered_at = marks[-1][1]

    @property
    def is_complete(self) -> bool:
        """Whether it ended, and every parameter came in it on every rank."""
        return self.outcome is Outcome.OK and self.found is not None and self.found.is_complete

    @property
    def has_taken(self) -> bool:
        return any(call.has_taken for call in self.calls)

    @property
    def has_changed_weights(self) -> bool:
        """Whether any of it reached a parameter: on any rank, once they have said so."""
        return self.has_taken if self.found is None else self.found.has_taken

    @property
    def has_waited(self) -> bool:
        return any(call.has_waited for call in self.calls)

    @property
    def is_bare(self) -> bool:
        """Whether nothing but its calls tells where it begins: no session, no name, no checkpoint."""
        return self.session is None and self.note is None and not self.origin.is_alone

    @property
    def tensors(self) -> int:
        return sum(call.tensors for call in self.calls)

    @property
    def narrowed(self) -> list[str]:
        return [name for call in self.calls for name in call.narrowed]

    @property
    def is_partial(self) -> bool:
        return self.note is not None and self.note.extent == PARTIAL

    def describe(self) -> str:
        version = f" ({self.version})" if self.version else ""
        return f"refit {self.id}{version}" + (f", {self.given_up}:" if self.given_up else "")

    def left_out(self) -> str:
        found = self.found or Verdict()
        if self.given_up and (self.is_partial or found.is_complete):
            return "send the update again, whole, as another refit"
        return found.left_out()
