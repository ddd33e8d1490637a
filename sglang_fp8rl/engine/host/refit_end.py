"""Where a refit ends: every rank says what it found, and all of them decide alike.

A NaN may be in a shard that rank 0 never sees, and only rank 0's answer reaches the client. Complete means
complete on every rank; `RefitLog.conclude` writes it down.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..arrival.update_scope import Origin, UpdateScope
from ..journal import Update
from ..refit import ModelRefit
from ..report.refit_record import Outcome, Refit, Verdict


def end_request(manager: Any, refit: ModelRefit, update: Update, result: Any) -> None:
    """Behind an update request: its refit goes on, or ends here.

    Args:
        result: of this rank; it tells the client of all ranks' failures afterwards.
    """
    report, scope = refit.report, update.scope
    message = update.error
    # A cache that could not be flushed behind weights that are stored is no failure of the refit.
    if message is None and not result.success and update.cache_flushed is not False:
        message = result.message
    if message is not None and not update.calls:  # refused before any weight was looked at
        update.refit = report.fail([message], scope)
    may_end = update.calls > 0 and report.log.may_end(scope)
    own = report.verdict(scope) if may_end else None
    gathered = _gathered(manager, (message, own, update.cache_flushed))
    if update.cache_flushed is None and any(flushed for *_, flushed in gathered):
        # A rank that failed asked for no flush; its prefixes would not be those of the others.
        update.cache_flushed = bool(manager.flush_cache())
    ranks = [(text, verdict) for text, verdict, _ in gathered]
    failed = [text for text, _ in ranks if text is not None]
    if failed:
        _fail_together(manager, refit, update, ranks, result)
        return
    if update.refit is not None:
        update.refit.cache_flushed = update.cache_flushed
    verdicts = [verdict for _, verdict in ranks if verdict is not None]
    if not verdicts:
        return
    ended = report.end_request(Verdict.of_all(verdicts), scope)
    if ended is not None:
        _tell(ended, result, needs_all=scope.origin is Origin.DISK)


def end_session_of(manager: Any, refit: ModelRefit, result: Any, error: str | None = None) -> None:
    """Behind `end_weight_update`: the running refit ends here; halves that never met fail it.

    Args:
        error: why SGLang's own end of the session failed on this rank.
    """
    report, log = refit.report, refit.report.log
    missing = tuple(refit.audit.give_up_halves().values())
    own = None
    if log.current is not None:
        own = report.verdict()
        failures = (*([error] if error else ()), *missing, *own.failures)
        own = replace(own, failures=failures)
    gathered = _gathered(manager, (error, own))
    verdicts = [one for _, one in gathered if one is not None]
    errors = [text for text, _ in gathered if text is not None]
    if errors and log.current is None:
        log.refuse(UpdateScope(Origin.TENSOR, in_session=True), errors)
    failed = report.end_session()
    if verdicts and log.current is not None:
        ended = log.conclude(Verdict.of_all(verdicts))
        if ended is not None:
            _tell(ended, result)
    elif failed is not None:
        _tell(failed, result)


def _tell(refit: Refit, result: Any, *, needs_all: bool = False) -> None:
    """Put into the answer what the refit left out, or why it failed."""
    if refit.outcome is Outcome.FAILED:
        text = f"{refit.describe()} failed: {' | '.join(refit.errors)}"
        result.message = text if result.success else f"{result.message} | {text}"
        result.success = False
    elif refit.outcome is Outcome.MIXED:
        result.message = f"{result.message} {refit.describe()} is mixed: {refit.left_out()}"
        result.success = result.success and not needs_all


def _fail_together(
    manager: Any, refit: ModelRefit, update: Update, ranks: list[Any], result: Any
) -> None:
    """One rank failed, so all did. What this rank's own calls found is written down already."""
    own = torch.distributed.get_rank(manager.tp_cpu_group)
    is_known = update.refit is not None and update.refit.outcome is Outcome.FAILED
    texts = [
        text if rank == own else f"tp_rank {rank}: {text}"
        for rank, (text, _) in enumerate(ranks)
        if text is not None and not (rank == own and is_known)
    ]
    report = refit.report
    if update.refit is None or update.refit is report.log.current:
        update.refit = report.fail(texts, update.scope)
    else:
        report.log.failed(update.refit, texts)
    if ranks[own][0] is None:
        result.success, result.message = False, " | ".join(texts)


def _gathered(manager: Any, own: tuple[Any, ...]) -> list[Any]:
    """What every rank says, by rank."""
    group = manager.tp_cpu_group
    size = torch.distributed.get_world_size(group)
    if size == 1:
        return [own]
    gathered: list[Any] = [None] * size
    torch.distributed.all_gather_object(gathered, own, group=group)
    return gathered
