"""The law of a refit: where it begins and ends, how it ended, and what is served after it.

docs/reliability.md states it for users. Nothing here knows a tensor: `RefitReport` says which names
came and which parameters are still lacking.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...wire.refit_note import RefitNote
from ..arrival.update_scope import Origin, UpdateScope
from .refit_record import ALONE, Outcome, Part, Refit, Session, State, Verdict

_MAX_VERSIONS = 64
_MAX_FAILURES = 16


class RefitLog:
    """Which refit runs, which was the last complete one, and what went wrong since.

    Attributes:
        current: the refit that has not ended.
        last: the one that ended last, of those that took anything or failed.
        complete: the last complete one.
        failures: of refits since then.
        left_out: refits since then that ended `mixed`.
        is_unloaded: no complete one since the start, or since the memory was released.
        session: whether one is open.
        versions: of the last refits, by id.
    """

    def __init__(self) -> None:
        self.current: Refit | None = None
        self.last: Refit | None = None
        self.complete: Refit | None = None
        self.failures: list[str] = []
        self.left_out: list[Refit] = []
        self.is_unloaded = True
        self.session: Session | None = None
        self.versions: dict[int, str | None] = {}
        self._count = 0
        # Of a client that flushes with every call: the call that opened its last complete refit, and the one
        # that opened two in a row (one says nothing: buckets may come in any order). Before there is any, its
        # very first call is taken for that.
        self._last_opening: Part | None = None
        self._habit: Part | None = None

    @property
    def state(self) -> State:
        if self.failures:
            return State.FAILED
        if self.is_unloaded:
            return State.UNLOADED
        current = self.current
        if self.left_out or (current is not None and current.outcome is Outcome.MIXED):
            return State.MIXED
        if current is not None or self.session is not None:
            return State.OPEN
        return State.WHOLE

    @property
    def is_idle(self) -> bool:
        """Whether no refit runs and no session is open."""
        return self.current is None and self.session is None

    # -- where a refit begins ----------------------------------------------------------------------

    def why_another(
        self, scope: UpdateScope, repeated: str | None, numbers: np.ndarray | None = None
    ) -> str:
        """Why a call can't belong to the running refit, in words; empty if it does.

        Args:
            repeated: a name of the call that came in the running refit already.
            numbers: of the call's names, where they are known.
        """
        current, note = self.current, self._note(scope)
        if current is None:
            return ""
        rules = (
            (
                current.origin is not scope.origin and scope.origin in ALONE,
                f"an update from {scope.origin.value} came before its end",
            ),
            (
                (note and note.id) != (current.note and current.note.id)
                or current.session is not self._session(scope),
                f"another one began before its end ({note.id if note else 'without a name'})",
            ),
            (
                current.outcome is Outcome.MIXED and not scope.is_last_call,
                "it had asked for the flush, and a client began that asks for it once",
            ),
            (
                self.opens_again(scope, numbers),
                "the call came again that opens this client's refits",
            ),
            (repeated is not None, f"{repeated} came again"),
            (
                scope.sender is not None and scope.sender in current.ousted,
                f"{scope.sender} went on, though another client had taken over from it",
            ),
        )
        return next((reason for holds, reason in rules if holds), "")

    def opens_again(self, scope: UpdateScope, numbers: np.ndarray | None) -> bool:
        """Whether a client that flushes with every call begins anew: its flushes don't say so."""
        current = self.current
        if current is None or self._habit is None or numbers is None:
            return False
        if not (current.is_bare and scope.is_last_call) or current.has_waited:
            return False
        return scope.sender == self._habit.sender and np.array_equal(numbers, self._habit.numbers)

    def taken_over(self, before: Refit, scope: UpdateScope, *, is_own: bool) -> set[str]:
        """Senders that may not go on with the refit that comes behind `before`.

        Args:
            is_own: whether this sender sends again what it had sent: then it is alone in beginning anew.
        """
        ousted = before.ousted if is_own else before.ousted | before.senders
        complete = self.complete
        team = complete.senders if complete is not None and complete.is_bare else set()
        return ousted - team if scope.sender in team else ousted

    def resumable(self, scope: UpdateScope) -> Refit | None:
        """The refit that a call may belong to though every parameter had come, if it repeats nothing.

        A name may add nothing that can be counted: what its loader writes is no box, or was written under
        another name.
        """
        last = self.last
        if self.current is not None or self.failures or last is None or last is not self.complete:
            return None
        is_named = last.note is not None or self._note(scope) is not None
        in_session = last.session is not None or self._session(scope) is not None
        is_alone = last.origin in ALONE or scope.origin in ALONE
        return None if is_named or in_session or is_alone else last

    def begin(
        self, scope: UpdateScope, ousted: set[str], numbers: np.ndarray | None = None
    ) -> Refit:
        """The refit of a call that belongs to no running one; of its names, where they are known."""
        self.current = self._new(scope)
        is_known = self._habit or self._last_opening or self.failures or self.left_out
        flushes = self.current.is_bare and scope.is_last_call
        if numbers is not None and len(numbers) and flushes and not is_known:
            # It may be refused, and be followed all the same.
            self._habit = Part(numbers, 0, 0.0, False, False, scope.sender)
        self.current.ousted = ousted - {scope.sender or ""}
        if self.current.session is not None:
            self.current.session.failed = None
        return self.current

    def refuse(self, scope: UpdateScope, texts: Iterable[str]) -> Refit:
        """A request failed that does not belong to the running refit, which goes on."""
        refit = self.last = self._new(scope)
        self.failed(refit, tuple(texts))
        return refit

    def _new(self, scope: UpdateScope) -> Refit:
        self._count += 1
        note = self._note(scope)
        version = scope.version or (note.version if note else None)
        return Refit(self._count, scope.origin, note, version, self._session(scope))

    def _session(self, scope: UpdateScope) -> Session | None:
        return self.session if scope.in_session and scope.note is None else None

    def _note(self, scope: UpdateScope) -> RefitNote | None:
        session = self._session(scope)
        return scope.note if session is None else session.note

    def unload(self) -> None:
        """The memory of the weights is gone."""
        self.current = None
        self.is_unloaded = True

    # -- where it ends -----------------------------------------------------------------------------

    def may_end(self, scope: UpdateScope) -> bool:
        """Whether the running refit ends behind this request, or does if it is complete."""
        current = self.current
        if current is None:
            return False
        if scope.origin is Origin.DISK:
            return True
        return current.session is None and (scope.is_last_call or current.note is None)

    def is_over(self, scope: UpdateScope, verdict: Verdict) -> bool:
        """Whether it does. Clients that flush with every call say nothing by it."""
        assert self.current is not None
        if scope.origin is Origin.DISK or verdict.failures:
            return True
        if self.current.note is not None:
            return scope.is_last_call
        has_ended = self.current.has_waited or not verdict.has_taken
        return verdict.is_complete or (scope.is_last_call and has_ended)

    def conclude(self, verdict: Verdict) -> Refit | None:
        """The running refit ends here: **this is where a refit is complete, or is not.**

        Returns:
            it; None if it wrote nothing, which is no refit.
        """
        refit, self.current = self.current, None
        if refit is None or not (verdict.has_taken or verdict.failures or refit.errors):
            return None
        refit.is_complete = verdict.is_complete
        refit.lacking, refit.lacking_names = verdict.lacking, verdict.names
        self.last = refit
        self._remember_version(refit)
        if verdict.failures or refit.errors:
            self.failed(refit, verdict.failures)
        elif verdict.is_complete:
            refit.outcome, self.complete = Outcome.OK, refit
            self.failures, self.left_out, self.is_unloaded = [], [], False
            if refit.is_bare and not refit.has_waited and len(refit.parts) > 1:
                self._opened_by(refit.parts[0])
        elif refit.is_partial and not refit.given_up:
            refit.outcome = Outcome.OK
        else:
            refit.outcome = Outcome.MIXED
            self.left_out.append(refit)
        return refit

    def _opened_by(self, part: Part) -> None:
        last, self._last_opening = self._last_opening, part
        if last is None:
            self._habit = None
        elif last.sender == part.sender and np.array_equal(last.numbers, part.numbers):
            self._habit = part

    def failed(self, refit: Refit, texts: Sequence[str]) -> None:
        """It ended, and these things are wrong with it."""
        refit.outcome, refit.is_complete = Outcome.FAILED, False
        refit.errors += [text for text in dict.fromkeys(texts) if text not in refit.errors]
        said = [f"{refit.describe()} failed: {text}" for text in refit.errors]
        new = [line for line in said if line not in self.failures]
        self.failures = (self.failures + new)[-_MAX_FAILURES:]
        if self.session is not None:
            self.session.failed = refit

    def _remember_version(self, refit: Refit) -> None:
        self.versions[refit.id] = refit.version
        while len(self.versions) > _MAX_VERSIONS:
            del self.versions[next(iter(self.versions))]
