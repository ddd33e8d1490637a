"""What the status has to say after any run of requests: the law of docs/reliability.md, in the simplest
terms, for one client process that names no refits."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Came:
    """One call of a refit.

    Attributes:
        names: that came.
        halves: FP8 weights among them whose scale did not.
        has_waited: whether it did not ask for the flush.
        sent: everything that was sent, in order.
    """

    names: set[str]
    halves: set[str]
    has_waited: bool
    sent: tuple[str, ...]


@dataclass
class Running:
    """A refit that has not ended; it is complete once all names have come.

    Attributes:
        was_flushed: whether its last call asked for the flush, so that it may end there or go on.
    """

    calls: list[Came] = field(default_factory=list)
    was_flushed: bool = False

    @property
    def names(self) -> set[str]:
        return set().union(*(call.names for call in self.calls))

    @property
    def halves(self) -> set[str]:
        return set().union(*(call.halves for call in self.calls))

    @property
    def has_waited(self) -> bool:
        return any(call.has_waited for call in self.calls)

    def behind(self, names: set[str]) -> list[Came]:
        """Its calls behind the last one that brought any of these names."""
        hits = [at for at, call in enumerate(self.calls) if call.names & names]
        return self.calls[hits[-1] + 1 :]


class ModelOfRefits:
    """Follows every request.

    Args:
        names: of all tensors; each is of a parameter, or part of one, that nothing else brings.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = set(names)
        # A client that flushes with every call: how its last whole refit was opened, and twice in a row.
        self._last_opening: tuple[str, ...] = ()
        self._habit: tuple[str, ...] = ()
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
        self._conclude(running, is_bare=False)
        return True

    def disk(self) -> bool:
        self._give_up()
        self.has_failed = self.has_mixed = False
        return True

    def unreadable(self, flush: bool) -> bool:
        """A call whose tensors nobody could look at fails the refit that it belongs to."""
        if self.running is None or not self._is_of_another(flush):
            self.running, self._session_failed = None, True
        self.has_failed = True
        return False

    def call(
        self,
        names: set[str],
        flush: bool,
        sent: tuple[str, ...],
        *,
        is_refused: bool = False,
        halves: frozenset[str] = frozenset(),
    ) -> bool:
        """A call that brings these names, `sent` in this order; of `halves` the scale is not there."""
        self._make_room(names, flush, sent)
        if self.running is None:
            is_known = self._habit or self._last_opening or self.has_failed or self.has_mixed
            if flush and not self.in_session and not is_known:
                self._habit = sent
            self.running, self._session_failed = Running(), False
        running = self.running
        running.calls.append(Came(names, set(halves), not flush, sent))
        if is_refused or (flush and not self.in_session and running.halves):
            self.running, self.has_failed, self._session_failed = None, True, True
            return False
        running.was_flushed = flush and not self.in_session
        if not self.in_session:
            is_complete = running.names == self._names and not running.halves
            if is_complete or (flush and running.has_waited):
                self._conclude(running)
                self.running = None
        return True

    def _make_room(self, names: set[str], flush: bool, sent: tuple[str, ...]) -> None:
        """Give the running refit up where this call is of another one."""
        running = self.running
        if running is None:
            return
        opens_again = flush and not self.in_session and not running.has_waited
        if self._is_of_another(flush) or (opens_again and sent and sent == self._habit):
            self._give_up()
        elif names & running.names:
            is_bare = not self.in_session and not running.halves
            kept = running.behind(names) if is_bare else []
            del running.calls[len(running.calls) - len(kept) :]
            self._give_up()
            self.running = Running(kept) if kept else None

    def _is_of_another(self, flush: bool) -> bool:
        """A client that flushes with every call was there, and this one does not."""
        return self.running is not None and self.running.was_flushed and not flush

    def _give_up(self) -> None:
        """It ended, though nobody ended it: it is not complete, whatever came."""
        running, self.running = self.running, None
        if running is not None and running.names - running.halves:
            self.has_mixed = True

    def _conclude(self, running: Running, *, is_bare: bool = True) -> None:
        if running.names == self._names and not running.halves:
            self.has_failed = self.has_mixed = False
            if is_bare and len(running.calls) > 1 and not running.has_waited:
                last, self._last_opening = self._last_opening, running.calls[0].sent
                if not last:
                    self._habit = ()
                elif last == self._last_opening:
                    self._habit = last
        elif running.names - running.halves:
            self.has_mixed = True
