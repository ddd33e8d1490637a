"""Where a refit ends: every rank says what it found, and all of them decide alike.

A NaN may be in a shard that rank 0 never sees, and only rank 0's answer reaches the client. Complete means
complete on every rank; `RefitLog.conclude` writes it down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from ...errors import RefitError, listed
from ...versions import RECORDS_WEIGHT_VERSIONS
from ...wire.refit_note import without_versions
from ...wire.stages import BETWEEN_REQUESTS
from ...wire.staging import OPEN_BUFFERS
from ..arrival.update import Origin, Update
from ..native.calls import NOTHING_SENT
from ..refit import ModelRefit
from ..report.refit_record import Outcome, Refit, Verdict
from .boundary import Boundary
from .flush import clear_stored_cache
from .metrics import observe_refit
from .unseen_writes import wrong_with_an_empty_session
from .weight_version import tell_version

_NOTHING_SEEN = RefitError(
    "the update",
    "no call of model.load_weights",
    "what reaches the weights in another way is not quantized, and is not known here",
    "Send all weights again, with load_format='flattened_bucket' or without one.",
)

_BEGUN_WITHOUT = RefitError(
    "an update",
    "an empty list of tensors for a rank, where a refit begins on others",
    "a refit begins on all ranks together",
    "Open a session, name the refit, or flush the cache before it; then send all weights again.",
)


@dataclass(frozen=True)
class _Said:
    """What one rank says of a request.

    Attributes:
        error: why it failed there.
        verdict: on the refit that runs.
        flushed: as `Update.cache_flushed`.
        is_empty: whether no tensor came in what was loaded.
        refit: the number of the refit that it belongs to; and `count`: of all refits that the rank knows of.
    """

    error: str | None = None
    verdict: Verdict | None = None
    flushed: bool | None = None
    is_empty: bool = False
    refit: int | None = None
    count: int = 0


@dataclass
class RequestEnd:
    """Behind an update request, or the end of a session, on one rank.

    Attributes:
        result: of this rank; it tells the client of all ranks' failures afterwards.
        is_asked: whether SGLang was asked at all: where one rank refused, none was.
    """

    boundary: Boundary
    manager: Any
    refit: ModelRefit
    update: Update
    result: Any
    is_asked: bool = True

    def answer(self) -> Any:
        """What the client is told, once all ranks have agreed. A collective."""
        step, refit, update, result = self.boundary.step, self.refit, self.update, self.result
        ended = self._end_request() or update.refit
        if ended is not None and _is_stored_cache_old(ended, update):
            step(clear_stored_cache, self.manager)
        if update.ends_session:
            refit.report.log.session = None  # it is over, whatever was raised there
            for extension in refit.extensions:
                step(extension.end_session, self.manager)
        elif self.is_asked:
            for extension in refit.extensions:
                step(extension.end_request, was_flushed=bool(update.cache_flushed))
        call = None if update.ends_session else update.origin.value
        step(observe_refit, self.manager, refit, call, result.success)
        if update.is_last_call or not result.success:
            step(OPEN_BUFFERS.close)  # a refit that goes on brings its handles anew
        if ended is not None:
            step(ended.add_stages, [*update.marks, (BETWEEN_REQUESTS, perf_counter())])
        version = refit.report.log.moved_to
        result.message = without_versions(result.message)
        step(tell_version, refit.report.log, result)
        is_told = not fail_behind(self.boundary, refit, ended, result)  # the same on every rank
        if is_told and version and RECORDS_WEIGHT_VERSIONS:
            scheduler = self.manager.scheduler
            step(lambda: scheduler.record_weight_version_change(new_version=version))
        return result

    def _end_request(self) -> Refit | None:
        """The refit of a request goes on, or ends here; returns what ended. A collective."""
        boundary, report, update = self.boundary, self.refit.report, self.update
        own = boundary.step(self._said) or _Said()
        if boundary.errors:
            own = replace(own, error=own.error or " | ".join(boundary.errors))
        ranks = boundary.gathered(own)
        boundary.errors.clear()  # what is raised from here on, `fail_behind` reports
        ended = boundary.step(self._end_together, ranks)
        session, is_of_it = report.log.session, update.in_session and not update.ends_session
        if session is not None and is_of_it and self.result.success:
            session.was_used, session.was_loaded = True, session.was_loaded or update.touches_target
        if report.log.running is None and (update.ends_session or not update.in_session):
            report.sent_twice.forget()
        return ended

    def _said(self) -> _Said:
        update, result, report, error = self.update, self.result, self.refit.report, None
        missing = tuple(self.refit.pairs.give_up().values()) if update.ends_session else ()
        # A cache that could not be flushed behind weights that are stored is no failure of the refit.
        if self.is_asked and not result.success and update.cache_flushed is not False:
            error = result.message
        elif update.ends_session:
            error = wrong_with_an_empty_session(self.refit)
        elif self.is_asked and not update.calls and update.touches_target:
            error = result.message = str(_NOTHING_SEEN)
            result.success = False
        verdict = None
        if report.log.current is not None and (update.calls or update.ends_session):
            verdict = report.verdict(update)
            verdict = replace(verdict, failures=(*missing, *verdict.failures))
        elif update.ends_session or not update.in_session:  # a draft alone was written
            missing += report.sent_twice.differing(report.log.stamp + 1)
        if error is not None or (missing and verdict is None):
            error = " | ".join(filter(None, (error, *missing)))
        is_empty = error is None and update.calls > 0 and not update.tensors
        number = None if update.refit is None else update.refit.id
        return _Said(error, verdict, update.cache_flushed, is_empty, number, report.log.count)

    def _end_together(self, ranks: list[_Said]) -> Refit | None:
        update, log, ended = self.update, self.refit.report.log, None
        # Where a request failed on one rank, others may have begun a refit in it; the next one is the same again.
        log.count = max(one.count for one in ranks)
        newest = max((one.refit or 0 for one in ranks), default=0)
        if newest > (0 if update.refit is None else update.refit.id):
            update.refit_number = newest
            log.part(update)
        if update.cache_flushed is None and any(one.flushed for one in ranks):
            # A rank that failed asked for no flush; its prefixes would not be those of the others.
            update.cache_flushed = bool(self.manager.flush_cache())
        errors = [one.error for one in ranks]
        if errors.count(None) == len(ranks) and (wrong := _wrong_with_empty_ranks(ranks)):
            errors = [str(wrong)] * len(ranks)
        if errors.count(None) < len(ranks):
            self._fail_together(errors)
            return update.refit
        if update.refit is not None:
            update.refit.cache_flushed = update.cache_flushed
        verdicts = [one.verdict for one in ranks if one.verdict is not None]
        if verdicts:
            ended = log.end_request(Verdict.of_all(verdicts), update)
        if ended is None and update.ends_session:
            ended = self.refit.report.end_session()
        _tell(ended, update, self.result)
        return ended

    def _fail_together(self, errors: Sequence[str | None]) -> None:
        """One rank failed, so all did; `errors` are by rank. What this rank's own calls found is written down already."""
        update, result, report = self.update, self.result, self.refit.report
        own = torch.distributed.get_rank(self.boundary.group)
        is_known = update.refit is not None and update.refit.outcome is Outcome.FAILED
        texts = [
            text if rank == own else f"tp_rank {rank}: {text}"
            for rank, text in enumerate(errors)
            if text is not None and not (rank == own and is_known)
        ]
        if errors[own] is None:
            result.success, result.message = False, " | ".join(texts)
        elif result.success:
            result.success, result.message = False, errors[own]
        if update.refit is None or update.refit is report.log.current:
            update.refit = report.fail(texts, update)
        else:
            report.log.failed(update.refit, texts)


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


def fail_behind(
    boundary: Boundary, refit: ModelRefit, ended: Refit | None = None, result: Any = None
) -> list[str]:
    """What was raised behind the end of a request, on any rank, fails it and its refit after all; return it. A collective.

    Args:
        ended: the refit; None if the request has none.
        result: None if the answer can't say so; then only the status does.
    """
    errors = boundary.failures()
    if not errors:
        return errors
    if result is not None:
        told = [] if result.success else [without_versions(result.message)]
        result.success, result.message = False, " | ".join([*told, *errors])
    log, before = refit.report.log, len(boundary.errors)
    if ended is not None:
        boundary.step(log.failed, ended, errors)
    if ended is None or len(boundary.errors) > before:
        log.add_failures(errors)
    return errors


def _wrong_with_empty_ranks(ranks: Sequence[_Said]) -> RefitError | None:
    """What is wrong with ranks that were sent nothing, though none failed."""
    if all(one.is_empty for one in ranks):
        return NOTHING_SENT
    is_apart = len({one.refit for one in ranks}) > 1
    return _BEGUN_WITHOUT if is_apart and any(one.is_empty for one in ranks) else None
