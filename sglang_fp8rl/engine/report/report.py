"""What refits wrote, and whether the served weights are of one piece."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...wire.refit_note import RefitNote, digest_text
from ..arrival.update_scope import Origin, UpdateScope
from ..interception.region import Region
from ..model.landings import NameTable
from ..model.parameters import Target
from .coverage import CoverageTable
from .full_extent import FullExtent
from .names_brought import NamesBrought
from .refit_record import Outcome, Part, Refit, Session, Verdict, left_out
from .refits import RefitLog
from .stamps import Stamps

MAX_LISTED = 16


@dataclass(frozen=True)
class Arrived:
    """What one call brought.

    Attributes:
        numbers: of all names.
        nbytes: that came.
        has_taken: whether any of it reached a parameter.
        taken: names that did, where they were not known before.
        layout: sum of their `layout_number`s, if the refit's note has a digest.
    """

    numbers: np.ndarray
    nbytes: int
    has_taken: bool
    taken: Iterable[str] = ()
    layout: int = 0


class RefitReport:
    """Bookkeeping of one model: cheap on the way, read by the status section.

    Args:
        targets: every parameter.
        names: that the model takes, and `learn_names`: fills them where nothing was loaded.

    Attributes:
        log: which refits there were.
        brought, coverage: when each name, and each part of a parameter, came last.
        targets: every parameter.
        known_names: every name that was ever stored.
    """

    def __init__(
        self, targets: Iterable[Target], names: NameTable, learn_names: Callable[[], object]
    ) -> None:
        self.targets = list(targets)
        self.coverage = CoverageTable([tuple(target.parameter.shape) for target in self.targets])
        self.brought = NamesBrought()
        self.log = RefitLog()
        self.known_names: dict[str, None] = {}
        self._extent = FullExtent(self.targets, self.coverage, names, learn_names)
        self._reached = Stamps(len(self.targets))
        self._started = 0.0

    @property
    def reached_at(self) -> np.ndarray:
        """Per parameter, the stamp of the call that reached it last."""
        return self._reached.of

    # -- filled during an update -----------------------------------------------------------------

    def start_call(
        self, scope: UpdateScope, numbers: np.ndarray, *, halves_wait: bool = False
    ) -> bool:
        """A call begins. Returns whether another refit does.

        Args:
            numbers: of the names to come; empty where they are not known (a checkpoint).
            halves_wait: whether halves of FP8 pairs do; then nothing of one refit goes on in the next.
        """
        self._started = time.perf_counter()
        log = self.log
        resumable = log.resumable(scope) if len(numbers) else None
        if resumable is not None and not self.brought.repeated(numbers, resumable.since):
            log.current = resumable
        before = log.current
        repeated = self.brought.repeated(numbers, before.since) if before else None
        reason = log.why_another(scope, repeated, numbers)
        ousted: set[str] = set()
        kept: list[Part] = []
        if before is not None and reason:
            is_own = log.opens_again(scope, numbers)
            if repeated is not None:
                latest = self.brought.latest(numbers)
                is_own |= before.sender_of(latest) == scope.sender
                if not (halves_wait or log.why_another(scope, None, numbers)):
                    kept = before.parted(latest, scope.sender)
            ousted = log.taken_over(before, scope, is_own=is_own)
            self.give_up(reason)
        refit = log.current or log.begin(scope, ousted, numbers)
        if before is not None and kept:
            self._move(before, kept, refit)
        refit.outcome, refit.version = Outcome.OPEN, scope.version or refit.version
        return refit is not before

    def _move(self, before: Refit, kept: list[Part], refit: Refit) -> None:
        """What came behind a stray call is of the refit that goes on, not of the one given up with it."""
        first = before.stamp
        for table in (self.brought.stamps, self.coverage, self._reached):
            table.shift(first, refit.since - first)
        refit.add(*kept)

    def written(self, target: Target, region: Region | None) -> None:
        stamp = self.refit.stamp
        if region is not None:
            self.coverage.write([self.coverage.number_of(target.index, region)], stamp)
        self.reached_at[target.index] = stamp

    def written_again(self, targets: np.ndarray, regions: np.ndarray) -> None:
        """As `written` for many at once: the targets' indices, and the regions' numbers."""
        stamp = self.refit.stamp
        self.coverage.write(regions, stamp)
        self.reached_at[targets] = stamp

    @property
    def refit(self) -> Refit:
        """The one that is being written."""
        assert self.log.current is not None
        return self.log.current

    def end_call(self, arrived: Arrived, errors: dict[str, str], scope: UpdateScope) -> None:
        """Add one call to its refit, which ends here if anything went wrong.

        Args:
            errors: name (or "") to what went wrong.
        """
        refit = self.refit
        self.brought.bring(arrived.numbers, refit.stamp)
        part = Part(
            arrived.numbers,
            arrived.nbytes,
            time.perf_counter() - self._started,
            arrived.has_taken,
            has_waited=not scope.is_last_call,
            sender=scope.sender,
            layout=arrived.layout,
        )
        refit.add(part)
        self.known_names.update(dict.fromkeys(n for n in arrived.taken if n not in errors))
        if errors:
            self.fail(errors.values(), scope)
        elif scope.origin is Origin.STARTUP:
            self.log.conclude(self.verdict())

    def fail(self, texts: Iterable[str], scope: UpdateScope) -> Refit:
        """Something was not stored, or could not be read: the refit that it belongs to ends here."""
        log = self.log
        if log.current is not None and log.why_another(scope, None):
            return log.refuse(scope, texts)
        refit = log.current or log.begin(scope, set())
        log.conclude(replace(self.verdict(), failures=tuple(dict.fromkeys(texts))))
        return refit

    # -- the end of a refit ------------------------------------------------------------------------

    def verdict(self, scope: UpdateScope | None = None) -> Verdict:
        """What this rank has to say of the running refit, if it ended here.

        Args:
            scope: of a request behind which it may go on; then names are looked for only if it does not.
        """
        refit = self.refit
        lacking = self.lacking()
        is_complete = not lacking.any()
        failures = tuple(self._not_as_announced(refit))
        found = Verdict(is_complete, int(lacking.sum()), (), failures, refit.has_taken)
        if is_complete or not (scope is None or self.log.is_over(scope, found)):
            return found
        names = self._extent.names_of(lacking, self.brought, refit.since)
        found = replace(found, names=tuple(names[:MAX_LISTED]))
        if refit.note is not None and refit.note.wants_all:
            found = replace(found, failures=(*failures, left_out(found.lacking, found.names)))
        return found

    def end_request(self, verdict: Verdict, scope: UpdateScope) -> Refit | None:
        """Behind a request of the running refit. Returns the refit, if it ends here.

        Args:
            verdict: of all ranks.
        """
        if self.log.is_over(scope, verdict):
            return self.log.conclude(verdict)
        if scope.is_last_call:  # all that was said to come; a client that always says so may go on
            self.refit.outcome = Outcome.MIXED
        return None

    def give_up(self, reason: str) -> None:
        """The running refit ends here, though nobody ended it: it is not complete, whatever came."""
        self.refit.given_up = reason
        self.log.conclude(replace(self.verdict(), is_complete=False, failures=()))

    def begin_session(self, note: RefitNote | None) -> None:
        """What a client sends until `end_session` is a refit of its own."""
        if self.log.current is not None:
            self.give_up("a session was opened before its end")
        self.log.session = Session(note)

    def end_session(self) -> Refit | None:
        """Returns the refit in it that failed, if none came behind that."""
        session, self.log.session = self.log.session, None
        return session.failed if session is not None else None

    def weights_lost(self) -> None:
        """Their memory was given back: nothing of what was written is there any more."""
        self.log.unload()
        self.coverage.forget()
        self._reached.forget()

    def lacking(self) -> np.ndarray:
        """Per parameter, whether the running refit left some of it out until now."""
        return self._extent.lacking(self.refit.since, self.reached_at)

    def _not_as_announced(self, refit: Refit) -> list[str]:
        note = refit.note
        if note is None or note.names is None:
            return []
        missing = self.brought.not_brought(note.names, refit.since)
        if missing:
            return [
                f"{len(missing)} of {len(note.names)} announced tensors did not come: "
                f"{_listed(missing)}. Send the update again, whole"
            ]
        if note.digest is not None and note.digest != digest_text(refit.layout):
            return [
                f"what came has the layout {digest_text(refit.layout)}, announced was {note.digest}: "
                "names, dtypes and shapes are those of the manifest. Send the update again, whole"
            ]
        return []


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
