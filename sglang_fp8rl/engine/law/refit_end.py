"""Where a refit ends: every rank says what it found, and all of them decide alike.

Complete means complete on every rank; `RefitLog.conclude` writes it down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from ...errors import RefitError, listed
from ...wire.stages import BETWEEN_REQUESTS
from ..arrival.update import Origin, Update
from ..host.boundary import Boundary
from ..host.flush import clear_stored_cache
from ..host.request_end import RequestEnd, Said, fail_behind, texts_of
from ..model.draft import lost_of_drafts
from .law import Law, law_of
from .record import Outcome, Refit, State, Verdict
from .unseen_writes import wrong_with_an_empty_session

_PARTED = RefitError(
    "an update",
    "a refit that runs on some ranks only",
    "a refit begins and ends on all ranks together",
    "Send the update again, whole.",
)


@dataclass(frozen=True)
class _Said(Said):
    """What one rank says of a request.

    Attributes:
        verdict: on the refit that runs.
        running: the number of the refit that runs; 0 if there is none.
        count: of all refits that the rank knows of.
        has_lost_drafts: whether a draft model lacks what it lost.
    """

    verdict: Verdict | None = None
    running: int = 0
    count: int = 0
    has_lost_drafts: bool = False


class RefitEnd(RequestEnd):
    """As `RequestEnd`; the refit of a request goes on behind it, or ends."""

    said = _Said

    @property
    def _law(self) -> Law:
        return law_of(self.refit)

    def _told(self, ended: Refit | None) -> str | None:
        log = self._law.log
        if ended is not None:
            ended.add_stages([*self.update.marks, (BETWEEN_REQUESTS, perf_counter())])
        if log.state is not State.WHOLE:
            return None  # it is told when it is
        version, log.moved_to = log.moved_to, None
        return version

    def _end_together(self) -> Refit | None:
        ended = super()._end_together() or self.update.refit
        self.boundary.step(self._settle, ended)
        return ended

    def _settle(self, ended: Refit | None) -> None:
        """What follows from it for the session, and for what came before."""
        update, law = self.update, self._law
        session, is_of_it = law.log.session, update.in_session and not update.ends_session
        if session is not None and is_of_it and self.result.success:
            session.was_used, session.was_loaded = True, session.was_loaded or update.touches_target
            if not update.touches_target and law.log.session_of(update) is session:
                session.version = update.version or session.version
        if law.log.running is None and not self._goes_on:
            law.ledger.sent_twice.forget()
        if ended is not None and _is_stored_cache_old(ended, update):
            clear_stored_cache(self.manager)

    def _said(self) -> _Said:
        update, law, missing = self.update, self._law, self._halves()
        error, verdict = self._failure(), None
        if not update.touches_target:
            law.join(update)
        if error is None and update.ends_session:
            error = wrong_with_an_empty_session(law.log.session, self.refit)
        if law.log.current is not None and (update.refit is not None or law.log.may_end(update)):
            verdict = law.verdict(update)
            verdict = replace(verdict, failures=(*missing, *verdict.failures))
        elif not self._goes_on:  # a draft alone was written
            missing += law.ledger.sent_twice.differing(law.ledger.stamp + 1)
        if error is not None or (missing and verdict is None):
            error = " | ".join(filter(None, (error, *missing)))
        is_empty = error is None and self._is_empty
        return _Said(
            error,
            update.cache_flushed,
            is_empty,
            refit=0 if update.refit is None else update.refit.id,
            verdict=verdict,
            running=0 if law.log.running is None else law.log.running.id,
            count=law.log.count,
            has_lost_drafts=bool(lost_of_drafts()),
        )

    def _halves(self) -> tuple[str, ...]:
        log = self._law.log
        is_anothers = log.running is not None and not log.may_end(self.update)
        return () if is_anothers else super()._halves()  # they wait on with its refit

    @property
    def _goes_on(self) -> bool:
        """Whether the client says that more requests of the same refit follow."""
        return self.update.keeps_halves and not self.update.ends_session

    def _join(self, newest: int) -> None:
        self.update.refit_number = newest
        self._law.part(self.update)

    def _decide(self, ranks: Sequence[_Said]) -> Refit | None:
        log = self._law.log
        # Where a request failed on one rank, others may have begun a refit in it; the next one is the same again.
        log.count = max(one.count for one in ranks)
        log.has_lost_drafts = any(one.has_lost_drafts for one in ranks)
        return super()._decide(ranks)

    def _wrong_between(self, ranks: Sequence[_Said]) -> RefitError | None:
        if wrong := super()._wrong_between(ranks):
            return wrong
        return _PARTED if len({(one.refit, one.verdict is None) for one in ranks}) > 1 else None

    def _fail(self, errors: dict[int, str], ranks: Sequence[_Said]) -> Refit | None:
        """As `RequestEnd._fail`; what this rank's own calls found is written down already."""
        update, law, own = self.update, self._law, torch.distributed.get_rank(self.boundary.group)
        is_known = update.refit is not None and update.refit.outcome is Outcome.FAILED
        new = {rank: text for rank, text in errors.items() if not (rank == own and is_known)}
        super()._fail(errors, ranks)
        if update.refit is None or update.refit is law.log.current:
            update.refit = law.fail(texts_of(new, own), update)
        else:
            law.log.failed(update.refit, texts_of(new, own))
        running = law.log.running
        if running is not None and any(one.running != running.id for one in ranks):
            law.give_up("another one came before its end, on other ranks")
        return update.refit

    def _concluded(self, ranks: Sequence[_Said]) -> Refit | None:
        update, law, ended = self.update, self._law, None
        if update.refit is not None:
            update.refit.cache_flushed = update.cache_flushed
        verdicts = [one.verdict for one in ranks if one.verdict is not None]
        if verdicts:
            ended = law.log.end_request(Verdict.of_all(verdicts), update)
        if ended is None and update.ends_session:
            ended = law.close_session()
        _tell(ended, update, self.result)
        return ended


def _is_stored_cache_old(refit: Refit, update: Update) -> bool:
    """Whether new weights may be computed with behind this request: its refit has ended, or the cache was flushed."""
    is_over = refit.outcome is not Outcome.OPEN
    return refit.has_changed_weights and (is_over or bool(update.cache_flushed))


def _tell(ended: Refit | None, update: Update, result: Any) -> None:
    """The answer says how the refit ended, if it did, and what of it was stored otherwise than it is served."""
    if ended is not None and ended.outcome is Outcome.FAILED:
        text = f"{ended.describe()} failed: {' | '.join(ended.errors)}"
        result.message = text if result.success else f"{result.message} | {text}"
        result.success = False
    elif ended is not None and ended.outcome is Outcome.MIXED:
        result.message = f"{result.message} {ended.describe()} is mixed: {ended.left_out()}"
        result.success = result.success and update.origin is not Origin.DISK
    told = ended or update.refit
    if told is not None and (names := told.narrowed):
        result.message += (
            f" Stored, though it came with fewer bits than it is served with: {listed(names)}"
        )


def end_by_flush(law: Law, manager: Any) -> bool:
    """A client flushed the cache outside of any update: returns whether nothing was raised, on any rank. A collective."""
    boundary = Boundary(manager.tp_cpu_group)
    own = boundary.step(law.verdict_at_flush)
    ranks = [one for one in boundary.gathered(own) if one is not None]
    # Behind a session's end there is no refit that this could divide.
    ended = boundary.step(law.flushed, Verdict.of_all(ranks) if ranks else None)
    if ended is not None and ended.has_changed_weights:
        boundary.step(clear_stored_cache, manager)
    return not fail_behind(boundary, manager, law.refit, ended)
