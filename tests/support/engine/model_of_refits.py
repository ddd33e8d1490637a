"""What the status has to say after any run of requests: the law of docs/reliability.md, in the simplest
terms, for clients that name no refits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Came:
    """One call: its names, FP8 weights among them whose scale did not come, and whether it asked for the flush."""

    names: set[str]
    halves: set[str]
    flush: bool


class ModelOfRefits:
    """Follows every request; each method returns whether it has to succeed.

    Args:
        names: of all tensors; each is of a parameter, or part of one, that nothing else brings.

    Attributes:
        calls: of the refit that runs, none of which brings a name twice.
        is_done: whether they are complete, so that only names that add nothing belong to them.
        is_in_step: whether they are known to begin with the first call of an update.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = set(names)
        self.calls: list[Came] = []
        self.is_done, self.is_in_step = False, True
        self.has_failed = self.has_mixed = self.in_session = self._session_failed = False

    @property
    def state(self) -> str:
        """The worst that holds."""
        is_running = bool(self.calls) and not self.is_done
        if self.has_failed:
            return "failed"
        if self.has_mixed or (is_running and not self.in_session and self.calls[-1].flush):
            return "mixed"
        return "open" if is_running or self.in_session else "whole"

    @property
    def halves(self) -> set[str]:
        return set().union(*(call.halves for call in self.calls))

    def begin(self) -> bool:
        if self.in_session:
            return False
        self._end(self.calls, was_said=False)
        self.in_session, self._session_failed = True, False
        return True

    def end(self) -> bool:
        if not self.in_session:
            return False
        has_failed = bool(self.halves) or (self._session_failed and not self._is_complete())
        if has_failed:
            self.fail()
        self._end(self.calls)
        self.in_session = False
        return not has_failed

    def disk(self) -> bool:
        self._end(self.calls, was_said=False)
        self._complete()
        return True

    def flush(self) -> bool:
        """The cache alone."""
        if not self.in_session:
            self._end(self.calls)
            self.is_in_step = True
        return True

    def fail(self, flush: bool = True) -> bool:
        """Nothing of a call could be read, or something not be stored."""
        self.has_failed = True
        if not self._is_of_another(flush):  # else the refit that runs goes on
            self.calls, self.is_done, self._session_failed = [], False, True
        self.is_in_step = self.is_in_step and self.in_session
        return False

    def call(
        self,
        names: set[str],
        flush: bool,
        *,
        is_refused: bool = False,
        halves: set[str] = frozenset(),
    ) -> bool:
        """A call that brings these names; of `halves` the scale is not there."""
        again = [at for at, call in enumerate(self.calls) if call.names & names]
        if self._is_of_another(flush):
            self._end(self.calls, was_said=False)
        elif again:
            behind = [] if self.is_done else self.calls[again[-1] + 1 :]
            self._end(self.calls[: again[-1] + 1], was_said=False)
            self.calls = behind
        self.calls.append(Came(names, set(halves), flush))
        self.is_done = False
        if is_refused or (halves and not self.in_session):
            return self.fail()
        if not self.in_session:
            ends = flush and any(not call.flush for call in self.calls)
            adds_up = self._is_complete() and (self.is_in_step or len(self.calls) == 1)
            if ends or adds_up:
                self._end(self.calls, goes_on=not ends)
        return True

    def _is_of_another(self, flush: bool) -> bool:
        """Of a client that does not ask for the flush, behind one that did."""
        is_running = bool(self.calls) and not self.is_done
        return is_running and not self.in_session and self.calls[-1].flush and not flush

    def _is_complete(self) -> bool:
        return set().union(*(call.names for call in self.calls)) == self._names and not self.halves

    def _end(self, calls: list[Came], *, was_said: bool = True, goes_on: bool = False) -> None:
        """A refit of these calls ends, said by the client or not."""
        if not calls or self.is_done:
            self.calls, self.is_done = [], False
            return
        stored = set().union(*(call.names - call.halves for call in calls))
        if not self.in_session:
            self.is_in_step = was_said
        if was_said and self._is_complete():
            self._complete()
        elif stored:
            self.has_mixed = True
        if goes_on:
            self.calls, self.is_done = calls, True
        else:
            self.calls = []

    def _complete(self) -> None:
        self.has_failed = self.has_mixed = False
        self.is_in_step = True
