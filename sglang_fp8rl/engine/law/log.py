"""The law of a refit: where it begins and ends, how it ended, and what is served after it.

docs/reliability.md states it for users. Nothing here knows a tensor: `Law` says which names
came and which parameters are still lacking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ...wire.refit_note import PARTIAL, RefitNote
from ..arrival.update import Update
from ..ledger.ledger import Arrived
from ..model.draft import lost_of_drafts
from .record import Outcome, Refit, Session, State, Verdict

MAX_LISTED = 16
MAX_REMEMBERED = 256
MAX_BROKEN = 4096  # names, and nothing but them


class RefitLog:
    """Which refit runs, which was the last complete one, and what went wrong since.

    Attributes:
        current: the refit that a call may go on with.
        last: the one that ended last, of those that took anything or failed.
        complete: the last complete one.
        failures: of refits since then.
        left_out: the last refits since then that ended `mixed`.
        is_unloaded: no complete one since the start, or since the memory was released; drafts say so themselves.
        session: whether one is open.
        moved_to: the version of the refit that ended last and was right, until it was told: when what is served is of
            one piece.
        count: refits so far, the same on every rank.
        begun: refits that something may be served of, in order; and some more.
        broken_off: names of partial refits that failed, or into which another one came: what comes of them later is a
            rest.
        has_lost_drafts: whether any rank's draft model lacks what it lost, as the ranks last said.
        is_in_step: whether the calls of clients that open no session and name nothing are known to begin
            with the first call of an update.
    """

    def __init__(self) -> None:
        self.current: Refit | None = None
        self.last: Refit | None = None
        self.complete: Refit | None = None
        self.failures: list[str] = []
        self.left_out: deque[Refit] = deque(maxlen=MAX_LISTED)
        self.is_unloaded = True
        self.session: Session | None = None
        self.moved_to: str | None = None
        self.broken_off: deque[str] = deque(maxlen=MAX_BROKEN)
        self.has_lost_drafts = False
        self.is_in_step = True
        self.begun: list[Refit] = []
        self.count = 0

    @property
    def state(self) -> State:
        if self.failures:
            return State.FAILED
        if self.is_unloaded or self.has_lost_drafts or lost_of_drafts():
            return State.UNLOADED
        running = self.running
        if self.left_out or (running is not None and running.outcome is Outcome.MIXED):
            return State.MIXED
        return State.OPEN if running is not None or self.session is not None else State.WHOLE

    @property
    def running(self) -> Refit | None:
        """The refit that has not ended; a current one that has is whole, and more names may follow it."""
        current = self.current
        return None if current is None or current.outcome is Outcome.OK else current

    # -- where a refit begins ----------------------------------------------------------------------

    def why_another(self, update: Update) -> str:
        """Why a call can't belong to the current refit, in words; empty if it may."""
        current, note = self.current, self._note(update)
        if current is None:
            return ""
        if update.origin.is_alone and current.origin is not update.origin:
            return f"an update from {update.origin.value} came before its end"
        if (note and note.id) != (current.note and current.note.id) or (
            current.session is not self.session_of(update)
        ):
            return f"another one began before its end ({note.id if note else 'without a name'})"
        if current.outcome is Outcome.MIXED and not update.is_last_call:
            return "it had asked for the flush, and a call came that did not"
        return ""

    def begin(self, update: Update, since: int, calls: Sequence[Arrived] = ()) -> Refit:
        """The refit of a call that belongs to no current one.

        Args:
            since: stamp of its first call.
            calls: of it before this one.
        """
        refit = self.current = self._new(update, since)
        refit.calls = list(calls)
        self.begun.append(refit)
        note = refit.note
        if note is not None and note.extent == PARTIAL and note.id in self.broken_off:
            refit.given_up = "whose name is that of one that was broken off"
        return refit

    def break_off(self, refit: Refit) -> None:
        """It ended before all of it came: what its client may still send, as if nothing were lost, is a rest."""
        note = refit.note
        if note is not None and note.extent == PARTIAL and note.id not in self.broken_off:
            self.broken_off.append(note.id)

    def refuse(self, update: Update, stamp: int, texts: Iterable[str]) -> Refit:
        """A request failed that does not belong to the running refit, which goes on; it wrote nothing since that stamp."""
        self.current = self.running
        refit = self.last = self._new(update, stamp)
        self.failed(refit, tuple(texts))
        return refit

    def _new(self, update: Update, since: int) -> Refit:
        number, note = update.refit_number or self.count + 1, self._note(update)
        self.count = max(self.count, number)
        version, session = update.version, self.session_of(update)
        if session is not None:
            session.has_begun, session.given_up = True, None
            version = version or session.version
        version = version or (note.version if note else None)
        return Refit(number, update.origin, since, note, version, session)

    def session_of(self, update: Update) -> Session | None:
        """The session that a request belongs to: none if it is a refit by itself, or names another than the session does."""
        is_part = update.in_session and not update.origin.is_alone
        session, note = self.session if is_part else None, update.note
        if session is None or note is None:
            return session
        return session if session.note is not None and session.note.id == note.id else None

    def _note(self, update: Update) -> RefitNote | None:
        session, own = self.session_of(update), update.note
        if session is None or session.note is None or own is None:
            return own if session is None else session.note
        extent, version = session.note.extent or own.extent, session.note.version or own.version
        return replace(session.note, extent=extent, version=version)

    # -- where it ends -----------------------------------------------------------------------------

    def may_end(self, update: Update) -> bool:
        """Whether it is the end of a session that may be the current refit's: not where another client named that."""
        session, current = self.session, self.current
        if not update.ends_session or session is None or current is None:
            return False
        return session.note is None or current.session is session

    def is_over(self, update: Update, verdict: Verdict) -> bool:
        """Whether the current refit ends behind this request."""
        current = self.current
        assert current is not None
        if update.origin.is_alone or update.ends_session:
            return True
        if current.session is not None:
            return False
        if current.note is not None:
            return update.is_last_call
        if verdict.failures:
            return True
        if update.is_last_call and (verdict.has_waited or not verdict.has_taken):
            return True
        # All came, once each. Of one update, if the first of these calls was its first.
        return verdict.is_complete and verdict.is_of_one

    def end_request(self, verdict: Verdict, update: Update) -> Refit | None:
        """Behind a request of the current refit. Returns the refit, if it ends here.

        Args:
            verdict: of all ranks.
        """
        current = self.current
        assert current is not None
        if self.running is None and not verdict.at_the_end().failures:
            if current.version is None:
                current.version = self.moved_to = update.version
            return None  # it has ended, and this brought nothing that could undo or mend anything
        failed = current.session.failed if current.session is not None else None
        if update.ends_session and failed is not None and not verdict.is_complete:
            text = (
                f"{failed.describe()} of this session failed, and not everything came again behind it. "
                "Send the update again, whole"
            )
            verdict = replace(verdict, failures=(*verdict.failures, text))
        if self.is_over(update, verdict):
            ended = self.conclude(verdict.at_the_end())
            is_flushed = update.is_last_call and verdict.has_waited
            if current.is_complete and current.is_bare and not is_flushed:
                self.current = current  # names may follow that bring nothing which can be counted
            return ended
        current.found = verdict
        if update.is_last_call and current.session is None:
            # All that was said to come; a client that always says so may go on.
            current.outcome = Outcome.MIXED
        return None

    def conclude(self, verdict: Verdict) -> Refit | None:
        """The current refit ends here: **this is where a refit is complete, or is not.**

        Returns:
            it; None if it wrote nothing, which is no refit.
        """
        refit, self.current = self.current, None
        if refit is None:
            return None
        if refit.is_bare:
            self.is_in_step = not (refit.given_up or verdict.failures)
        if not (verdict.has_taken or verdict.failures or refit.errors):
            return None
        refit.found, self.moved_to = verdict, None
        self.last = refit
        if verdict.failures or refit.errors:
            self.failed(refit, verdict.failures)
        elif refit.given_up or not (verdict.is_complete or refit.is_partial):
            refit.outcome = Outcome.MIXED
            self.left_out.append(refit)
        else:
            refit.outcome = Outcome.OK
            if refit.is_complete:
                self.complete = refit
                self.failures, self.is_unloaded, self.is_in_step = [], False, True
                self.left_out.clear()
            if not (self.failures or self.is_unloaded or self.left_out):
                self.moved_to = refit.version
        return refit

    def failed(self, refit: Refit, texts: Sequence[str]) -> None:
        """It ended, and these things are wrong with it."""
        if self.current is refit:
            self.current = None
        refit.outcome = Outcome.FAILED
        refit.errors += [text for text in dict.fromkeys(texts) if text not in refit.errors]
        self.add_failures(f"{refit.describe()} failed: {text}" for text in refit.errors)
        self.break_off(refit)
        if refit.session is not None:
            refit.session.failed = refit
        if refit.is_bare:
            self.is_in_step = False

    def add_failures(self, lines: Iterable[str]) -> None:
        """Weights are not what they should be, as these lines say; the last ones are kept."""
        new = [line for line in lines if line not in self.failures]
        self.failures = (self.failures + new)[-MAX_LISTED:]
        self.moved_to = None

    # -- what is served ----------------------------------------------------------------------------

    def refits_of(self, stamps: np.ndarray) -> list[Refit]:
        """The refits that wrote with these stamps; those that wrote with none of them are forgotten.

        Args:
            stamps: of everything that is served.
        """
        begun = np.array([refit.since for refit in self.begun], np.int64)
        used = np.unique(np.searchsorted(begun, stamps, "right") - 1)
        found = [self.begun[at] for at in used.tolist() if at >= 0]
        self.begun = list(dict.fromkeys([*found, *self.begun[-1:]]))
        return found
