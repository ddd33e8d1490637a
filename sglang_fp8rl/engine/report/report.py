"""What refits wrote, and what is still lacking in the one that runs."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ...errors import RefitError
from ...wire.refit_note import ALL, RefitNote
from ..arrival.update import Origin, Update
from ..interception import Region
from ..model.landings import NameTable
from ..model.parameters import Target
from .coverage import NEVER, CoverageTable, FullExtent
from .law import MAX_LISTED, MAX_REMEMBERED, RefitLog
from .refit_record import Arrived, Outcome, Refit, Session, Verdict
from .sent_twice import SentTwice


class RefitReport:
    """Bookkeeping of one model: cheap on the way, read by the status section.

    Attributes:
        targets: every parameter.
        names: that the model takes.
        unknown_because: why it is not known what a full refit writes; empty if it is.
        brought, coverage: when each name, and each part of a parameter, came last.
    """

    def __init__(self, targets: Iterable[Target], names: NameTable) -> None:
        self.targets, self.names, self.unknown_because = list(targets), names, ""
        self.coverage = CoverageTable([tuple(target.parameter.shape) for target in self.targets])
        self.brought, self.sent_twice, self.log = NamesBrought(), SentTwice(), RefitLog()
        self._extent = FullExtent(self.targets, self.coverage, names)
        self._started = 0.0

    # -- filled during an update -----------------------------------------------------------------

    def start_call(self, update: Update, numbers: np.ndarray) -> int:
        """A call begins, of the current refit or of a new one.

        Args:
            numbers: of the names to come; empty where they are not known (a checkpoint).

        Returns:
            the stamp of its refit's first call: what waits from an earlier one is of another refit.
        """
        self._started = time.perf_counter()
        log = self.log
        log.stamp += 1
        if len(log.begun) > MAX_REMEMBERED:
            log.refits_of(self.coverage.oldest()[1])
        latest, name = self.brought.latest(numbers)
        if log.current is not None and (reason := log.why_another(update)):
            self.give_up(reason)
        elif log.current is not None and latest >= log.current.since:
            self._begin_behind(log.current, latest, f"{name} came again", update)
        refit = log.current or log.begin(update, log.stamp)
        if log.running is not None:  # else everything has come in it
            refit.outcome, refit.version = Outcome.OPEN, update.version or refit.version
        return refit.since

    def _begin_behind(self, current: Refit, latest: int, reason: str, update: Update) -> None:
        """A tensor comes again: a refit has it once, so it began behind the call that brought it before."""
        behind: list[Arrived] = []
        if self.log.running is not None:
            behind = [call for call in current.calls if call.stamp > latest]
            current.calls = [call for call in current.calls if call.stamp <= latest]
        self.give_up(reason)
        if behind:
            self.log.begin(update, latest + 1, behind)

    def written(self, target: Target, region: Region | None) -> int | None:
        """Returns the number of the box; None for what is no box."""
        return self.coverage.write_one(target.index, region, self.log.stamp)

    @property
    def refit(self) -> Refit:
        """The one that is being written."""
        assert self.log.current is not None
        return self.log.current

    def end_call(self, arrived: Arrived, errors: dict[str, str], update: Update) -> Refit:
        """Add one call to its refit, which ends here if anything went wrong; returns that refit.

        Args:
            errors: name (or "") to what went wrong.
        """
        if self.log.running is None and (arrived.has_taken or errors):
            # Everything has come in the current one, and this by other names: a refit has each parameter once.
            self.log.begin(update, self.log.stamp)
        refit = self.refit
        refit.outcome = Outcome.OPEN
        stamp, seconds = self.log.stamp, time.perf_counter() - self._started
        self.brought.bring(arrived.numbers, stamp)
        has_waited = not update.is_last_call
        call = arrived._replace(stamp=stamp, seconds=seconds, has_waited=has_waited)
        refit.calls.append(call)
        if errors:
            self.fail(errors.values(), update)
        elif update.origin is Origin.STARTUP:
            self.log.conclude(self.verdict())
        return refit

    def fail(self, texts: Iterable[str], update: Update) -> Refit:
        """Something was not stored, or could not be read: the refit that it belongs to ends here."""
        log = self.log
        if log.running is not None and log.why_another(update):
            return log.refuse(update, texts)
        if log.running is None:
            log.stamp += 1  # it wrote nothing: no stamp of what is served may be its own
            log.begin(update, log.stamp)
        refit = self.refit
        log.conclude(replace(self.verdict(), failures=tuple(dict.fromkeys(texts))))
        return refit

    # -- the end of a refit ------------------------------------------------------------------------

    def verdict(self, update: Update | None = None) -> Verdict:
        """What this rank has to say of the running refit, if it ended here.

        Args:
            update: a request behind which it may go on; then names are looked for only if it does not.
        """
        refit = self.refit
        lacking, others = self._extent.left_out(refit.since)
        not_brought = functools.partial(self.brought.not_brought, since=refit.since)
        others = not_brought(others)
        count = int(lacking.sum()) + len(others)
        failures = (self.unknown_because,) if self.unknown_because else ()
        found = Verdict(count, (), failures, refit.has_taken)
        if update is not None:
            if not self.log.is_over(update, found):
                return found
            found = replace(found, failures=failures + self.sent_twice.differing(refit.since))
        if not count:
            return found
        names = others + self._extent.names_of(lacking, not_brought)
        found = replace(found, names=tuple(names[:MAX_LISTED]))
        if refit.note is not None and refit.note.extent == ALL:
            found = replace(found, failures=(*found.failures, found.left_out()))
        return found

    def verdict_at_flush(self) -> Verdict | None:
        """What this rank has to say of the refit that a flush outside of any update ends; None if there is none."""
        running = self.log.running
        if running is None or not running.is_bare or running.found is None:
            return None
        found = self.verdict()
        differing = self.sent_twice.differing(running.since)
        return replace(found, failures=found.failures + differing)

    def flushed(self, found: Verdict | None) -> Refit | None:
        """A client flushed the cache outside of any update: what came before is one refit, what follows another.

        Args:
            found: of all ranks, as `verdict_at_flush`.

        Returns:
            the refit that ends here, if any. It moves no version: a flush's answer has no place for one.
        """
        log, ended = self.log, None
        if log.session is not None or (log.current is not None and not log.current.is_bare):
            return None
        if found is not None:
            ended, log.moved_to = log.conclude(found), None
            self.sent_twice.forget()
        log.current, log.is_in_step = None, True
        return ended

    def give_up(self, reason: str) -> None:
        """The running refit ends here, though nobody ended it: it is not complete, whatever came."""
        if self.log.running is not None:
            self.refit.given_up = reason
            self.log.conclude(replace(self.verdict(), failures=()))
        self.log.current = None

    def begin_session(self, note: RefitNote | None, number: int | None = None) -> None:
        """What a client sends until `end_session` is a refit of its own; args as of `Session`."""
        self.give_up("a session was opened before its end")
        self.log.session = Session(note, number)

    def end_session(self) -> Refit | None:
        """Returns the last refit in it that failed, if any."""
        session, self.log.session = self.log.session, None
        return session.failed if session is not None else None

    def weights_lost(self) -> None:
        """Their memory was given back: nothing of what was written is there any more."""
        self.log.current, self.log.is_unloaded = None, True
        self.coverage.forget()

    def lacking(self) -> np.ndarray:
        """Per parameter, whether the running refit left some of it out until now."""
        return self._extent.left_out(self.refit.since)[0]


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

    def latest(self, numbers: np.ndarray) -> tuple[int, str]:
        """The stamp of the last call that brought any of these names, and the first one that it brought."""
        if not len(numbers):
            return NEVER, ""
        last = numbers[self._stamps[numbers].argmax()]
        return int(self._stamps[last]), self._names[last]

    def not_brought(self, names: Iterable[str], since: int) -> list[str]:
        """Those of `names` that did not come at that stamp or later."""
        names = list(names)
        numbers = self.numbers_of(names)  # first: it makes room for names that never came
        came = self._stamps[numbers] >= since
        return [name for name, has_come in zip(names, came.tolist(), strict=True) if not has_come]
