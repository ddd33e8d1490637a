"""What the status has to say after any run of requests: the law of docs/reliability.md, in the simplest
terms, for one client process that names no refits."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Running:
    """A refit that has not ended.

    Attributes:
        names: that came; it is complete once all have.
        has_waited: whether a call of it did not ask for the flush.
        was_flushed: whether its last call did, so that it may end there or go on.
        halves: FP8 weights whose scale has not come.
    """

    names: set[str] = field(default_factory=set)
    has_waited: bool = False
    was_flushed: bool = False
    halves: set[str] = field(default_factory=set)


class ModelOfRefits:
    """Follows every request.

    Args:
        names: of all tensors; each is of a parameter, or part of one, that nothing else brings.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = set(names)
        self.running: Running | None = None
        self.has_failed = self.has_mixed = self.in_session = self._session_failed = False

    @property
    def state(self) -> str:
        """The worst that holds."""
        if self.has_failed:
            return "failed"
        if self.has_mixed or (self.running is not None and self.running.was_flushed):
            return "mixed"
        return "open" if self.running is not None or self.in_session else "whole"

    def begin(self) -> bool:
        """Returns whether it has to succeed, as all methods below."""
        if self.in_session:
            return False
        self._give_up()
        self.in_session, self._session_failed = True, False
        return True

    def end(self) -> bool:
        if not self.in_session:
            return False
        running, self.running, self.in_session = self.running, None, False
        if running is None:
            return not self._session_failed
        if running.halves:
            self.has_failed = True
            return False
        self._conclude(running)
        return True

    def disk(self) -> bool:
        self._give_up()
        self._conclude(Running(set(self._names)))
        return True

    def unreadable(self, flush: bool) -> bool:
        """A call whose tensors nobody could look at fails the refit that it belongs to."""
        if not self._goes_on(set(), flush):
            self.has_failed = True
            return False
        return self.call(set(), flush, is_refused=True)

    def call(
        self,
        names: set[str],
        flush: bool,
        *,
        is_refused: bool = False,
        halves: frozenset[str] = frozenset(),
    ) -> bool:
        """A call that brings these names; of `halves` the scale is not among them."""
        if not self._goes_on(names, flush):
            self._give_up()
        if self.running is None:
            self.running, self._session_failed = Running(), False
        running = self.running
        running.was_flushed = False
        running.has_waited |= not flush
        running.names |= names - halves
        running.halves |= halves
        if is_refused or (flush and not self.in_session and running.halves):
            self.running, self.has_failed, self._session_failed = None, True, True
            return False
        if not self.in_session:
            is_complete = running.names == self._names and not running.halves
            if is_complete or (flush and running.has_waited):
                self._conclude(running)
                self.running = None
            else:
                running.was_flushed = flush
        return True

    def _goes_on(self, names: set[str], flush: bool) -> bool:
        """Whether a call belongs to the running refit, or there is none."""
        running = self.running
        if running is None:
            return True
        came_again = bool(names & (running.names | running.halves))
        return not came_again and not (running.was_flushed and not flush)

    def _give_up(self) -> None:
        """It ended, though nobody ended it: it is not complete, whatever came."""
        running, self.running = self.running, None
        if running is not None and running.names:
            self.has_mixed = True

    def _conclude(self, running: Running) -> None:
        if running.names == self._names:
            self.has_failed = self.has_mixed = False
        elif running.names:
            self.has_mixed = True
