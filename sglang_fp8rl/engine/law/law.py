"""The law of a refit beside the updates of one model: what came in it, what is still lacking, and how it ended."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import RefitError
from ...wire.refit_note import ALL, RefitNote
from ..arrival.update import Origin, Update
from ..extension import Extension
from ..ledger.coverage import NEVER
from ..ledger.ledger import Arrived
from ..native.call import Call
from .extent import FullExtent
from .log import MAX_LISTED, MAX_REMEMBERED, RefitLog
from .record import Outcome, Refit, Session, Verdict
from .unseen_writes import memory_number


class Law(Extension):
    """What refits wrote, and what is still lacking in the one that runs.

    Attributes:
        ledger: of the model.
        brought: when each name came last.
        log: of its refits.
    """

    def __init__(self, refit: Any) -> None:
        super().__init__(refit)
        self.ledger = refit.ledger
        self.brought, self.log = NamesBrought(), RefitLog()
        self._extent = FullExtent(self.ledger)
        self._started = 0.0

    # -- filled during an update -----------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """A call begins, of the current refit or of a new one."""
        if call.bucket is not None and call.brings.numbers is None:
            numbers = self.brought.numbers_of(call.bucket.names)
            call.brings = call.brings._replace(numbers=numbers)
        call.update.refit = self.start_call(call.update, call.brings.numbers)
        if self.refit.pairs.halves:
            self.refit.pairs.drop_before(call.update.refit.since)

    def start_call(self, update: Update, numbers: np.ndarray | None) -> Refit:
        """Returns the refit that a call belongs to.

        Args:
            numbers: of the names to come; None where they are not known (a checkpoint).
        """
        self._started = time.perf_counter()
        log, stamp = self.log, self.ledger.stamp
        if len(log.begun) > MAX_REMEMBERED:
            log.refits_of(self.ledger.coverage.oldest()[1])
        latest, name = self.brought.latest(numbers)
        if log.current is not None and (reason := log.why_another(update)):
            self.give_up(reason)
        elif log.current is not None and latest >= log.current.since:
            self._begin_behind(log.current, latest, f"{name} came again", update)
        refit = log.current or log.begin(update, stamp)
        if log.running is not None:  # else everything has come in it
            refit.outcome, refit.version = Outcome.OPEN, update.version or refit.version
        return refit

    def _begin_behind(self, current: Refit, latest: int, reason: str, update: Update) -> None:
        """A tensor comes again: a refit has it once, so it began behind the call that brought it before."""
        behind: list[Arrived] = []
        if self.log.running is not None:
            behind = [call for call in current.calls if call.stamp > latest]
            current.calls = [call for call in current.calls if call.stamp <= latest]
        self.give_up(reason, begins_anew=True)
        if behind:
            self.log.begin(update, latest + 1, behind)

    def join(self, update: Update) -> None:
        """A request for a draft alone is of the refit that runs, if it names that: its last one may end it."""
        running = self.log.running
        if running is not None and not (running.is_bare or self.log.why_another(update)):
            update.refit, running.version = running, update.version or running.version

    def part(self, update: Update) -> None:
        """Other ranks began a refit in this request, whose calls joined an older one here: it begins here too."""
        log, joined = self.log, self.log.current
        if joined is None or joined is not update.refit or not update.calls:
            return
        if joined.id == update.refit_number:
            return
        first = self.ledger.stamp - update.calls + 1
        behind = [call for call in joined.calls if call.stamp >= first]
        joined.calls = [call for call in joined.calls if call.stamp < first]
        self.give_up("another one began on other ranks", begins_anew=True)
        update.refit = log.begin(update, first, behind)

    @property
    def current(self) -> Refit:
        """The one that is being written."""
        assert self.log.current is not None
        return self.log.current

    def refused(self, update: Update, error: Exception) -> None:
        update.refit = self.fail([str(error)], update)
        if self.log.running is None:  # else it was another client's, who goes on
            self.refit.pairs.drop()

    def closed(self, call: Call) -> None:
        brought = call.brought
        if brought.numbers is None:  # of a stream: it is known by now
            brought = brought._replace(numbers=self.brought.numbers_of(call.names))
        call.update.refit = self.end_call(brought, call.errors, call.update)

    def end_call(self, brought: Arrived, errors: dict[str, str], update: Update) -> Refit:
        """Add one call to its refit, which ends here if anything went wrong; returns that refit.

        Args:
            errors: name (or "") to what went wrong.
        """
        stamp = self.ledger.stamp
        if self.log.running is None and (brought.has_taken or errors):
            # Everything has come in the current one, and this by other names: a refit has each parameter once.
            self.log.begin(update, stamp)
        refit = self.current
        if refit is self.log.running:  # else it is complete, and this brought nothing
            refit.outcome = Outcome.OPEN
        self.brought.bring(brought.numbers, stamp)
        seconds = time.perf_counter() - self._started
        has_waited = not update.is_last_call
        call = brought._replace(numbers=None, stamp=stamp, seconds=seconds, has_waited=has_waited)
        refit.calls.append(call)
        if errors:
            self.fail(errors.values(), update)
        elif update.origin is Origin.STARTUP:
            self.log.conclude(self.verdict())
        return refit

    def fail(self, texts: Iterable[str], update: Update) -> Refit:
        """Something was not stored, or could not be read: the refit that it belongs to ends here."""
        log, refit = self.log, self.log.running
        if refit is None or log.why_another(update):
            return log.refuse(update, self.ledger.stamp + 1, texts)
        log.conclude(replace(self.verdict(), failures=tuple(dict.fromkeys(texts))))
        return refit

    # -- the end of a refit ------------------------------------------------------------------------

    def verdict(self, update: Update | None = None) -> Verdict:
        """What this rank has to say of the running refit, if it ended here.

        Args:
            update: a request behind which it may go on; then names are looked for only if it does not.
        """
        refit, names = self.current, self.ledger.names
        lacking, others = self._extent.left_out(refit.since)
        not_brought = functools.partial(self.brought.not_brought, since=refit.since)
        others = not_brought(others)
        count = int(lacking.sum()) + len(others)
        failures = (names.unknown_because,) if names.unknown_because else ()
        found = Verdict(count, failures=failures, has_taken=refit.has_taken)
        if update is not None:
            is_of_one = self.log.is_in_step or len(refit.calls) <= max(1, update.calls)
            found = replace(found, has_waited=refit.has_waited, is_of_one=is_of_one)
            if not self.log.is_over(update, found):
                return found
            found = replace(found, differing=self.ledger.sent_twice.differing(refit.since))
        if not count:
            return found
        examples = others + self._extent.names_of(lacking, not_brought)
        found = replace(found, names=tuple(examples[:MAX_LISTED]))
        if refit.note is not None and refit.note.extent == ALL:
            found = replace(found, failures=(*found.failures, found.left_out()))
        return found

    def verdict_at_flush(self) -> Verdict | None:
        """What this rank has to say of the refit that a flush outside of any update ends; None if there is none."""
        running = self.log.running
        if running is None or not running.is_bare or running.found is None:
            return None
        return replace(self.verdict(), differing=self.ledger.sent_twice.differing(running.since))

    def flushed(self, found: Verdict | None) -> Refit | None:
        """A client flushed the cache outside of any update: what came before is one refit, what follows another.

        Args:
            found: of all ranks, as `verdict_at_flush`.

        Returns:
            the refit that ends here, if any. It moves no version: a flush's answer has no place for one.
        """
        log, ended = self.log, None
        for refit in (log.last, log.current):
            if refit is not None and refit.cache_flushed is False:
                refit.cache_flushed = True
        if log.session is not None or (log.current is not None and not log.current.is_bare):
            return None
        if found is not None:
            ended, log.moved_to = log.conclude(found.at_the_end()), None
            self.ledger.sent_twice.forget()
        log.current, log.is_in_step = None, True
        return ended

    def give_up(self, reason: str, *, begins_anew: bool = False) -> None:
        """The running refit ends here, though nobody ended it: it is not complete, whatever came.

        Args:
            begins_anew: whether its client does; else it may go on as if nothing were lost.
        """
        running = self.log.running
        if running is not None:
            running.given_up = reason
            if running.session is not None:
                running.session.given_up = running
            if not begins_anew:
                self.log.break_off(running)
            has_taken = running.has_changed_weights  # on any rank
            self.log.conclude(replace(self.verdict(), failures=(), has_taken=has_taken))
        self.log.current = None

    def begin_session(self, note: RefitNote | None) -> None:
        """What a client sends until its end is a refit of its own."""
        number = memory_number(self.refit) if note is None else None
        self.give_up("a session was opened before its end")
        self.log.session = Session(note, number)

    def drop_session(self) -> None:
        self.log.session = None

    def close_session(self) -> Refit | None:
        """Returns the last refit in it that failed, or that was given up, if any."""
        session, self.log.session = self.log.session, None
        return None if session is None else session.failed or session.given_up

    def fail_served(self, errors: list[str], ended: Refit | None) -> None:
        if ended is not None:
            self.log.failed(ended, errors)
        else:
            self.log.add_failures(errors)

    def weights_lost(self) -> None:
        """Nothing of what was written is there any more."""
        self.ledger.coverage.forget()
        self.refit.pairs.drop()
        self.give_up("the memory of the weights was given back before its end")
        self.log.is_unloaded, self.log.moved_to = True, None

    def lacking(self) -> np.ndarray:
        """Per parameter, whether the running refit left some of it out until now."""
        return self._extent.left_out(self.current.since)[0]


MAX_NAMES = 1 << 20  # ten times what the largest checkpoints have


class NamesBrought:
    """When each name came last. Names go by number, so that a bucket that was seen before costs one lookup."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._stamps = np.empty(0, np.int64)

    def numbers_of(self, names: Iterable[str]) -> np.ndarray:
        """A number for each name; it stays the same."""
        names, numbers = list(names), self._numbers
        new = [name for name in dict.fromkeys(names) if name not in numbers]
        if len(numbers) + len(new) > MAX_NAMES:
            raise RefitError(
                new[MAX_NAMES - len(numbers)],
                f"a new name behind {MAX_NAMES} others",
                "each refit brings the same names, those of the checkpoint",
                "Look at what the trainer calls its tensors; a server that is started anew forgets them.",
            )
        if new:
            self._names += new
            numbers.update(zip(new, itertools.count(len(numbers)), strict=False))
            self._stamps = np.pad(self._stamps, (0, len(new)), constant_values=NEVER)
        return np.fromiter(map(numbers.__getitem__, names), np.int64, len(names))

    def bring(self, numbers: np.ndarray, stamp: int) -> None:
        """These names came in the call of that stamp, which is larger than any before."""
        self._stamps[numbers] = stamp

    def latest(self, numbers: np.ndarray | None) -> tuple[int, str]:
        """The stamp of the last call that brought any of these names, and the first one that it brought."""
        if numbers is None or not len(numbers):
            return NEVER, ""
        last = numbers[self._stamps[numbers].argmax()]
        return int(self._stamps[last]), self._names[last]

    def not_brought(self, names: Iterable[str], since: int) -> list[str]:
        """Those of `names` that did not come at that stamp or later."""
        names = list(names)
        numbers = self.numbers_of(names)  # first: it makes room for names that never came
        came = self._stamps[numbers] >= since
        return [name for name, has_come in zip(names, came.tolist(), strict=True) if not has_come]


def law_of(refit: Any) -> Law:
    """The law of a served model (`ModelRefit`)."""
    return next(one for one in refit.extensions if isinstance(one, Law))
