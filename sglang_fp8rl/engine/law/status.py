"""What the law says in the status: the refits that there were, and whether what is served is of one piece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import listed
from ..model.draft import lost_of_drafts
from .law import Law
from .log import MAX_LISTED
from .record import State, Verdict

_MAX_TEXT = 500
_UNLOADED = "weights that were never loaded (dummy weights, or memory that was released?): no complete refit has come since"
_STATES = [state.value for state in State]


def section(law: Law) -> dict[str, Any]:
    """What is known of refits."""
    log = law.log
    complete = log.complete and {"id": log.complete.id, "version": log.complete.version}
    return {
        "last_refit": last_refit(law),
        "last_complete_refit": complete,
        "served": served(law),
        "state": log.state.value,
        "consistent": log.state is State.WHOLE,
        "problems": problems(law),
    }


def badness(status: Mapping[str, Any]) -> tuple[int, int]:
    """The worse state; of two that are alike, the one whose cache was not flushed."""
    is_stale = (status["last_refit"] or {}).get("cache_flushed") is False
    return _STATES.index(status["state"]), int(is_stale)


def problems(law: Law) -> list[str]:
    """Why the served weights are not of one piece; empty if they are."""
    log = law.log
    if log.state is State.WHOLE:
        return []
    found = [_UNLOADED] if log.is_unloaded else []
    lost = lost_of_drafts()
    if lost:
        found.append(
            f"the draft model's memory was released, and {listed(lost)} have not come since"
        )
    elif log.has_lost_drafts:
        found.append(
            "the draft model's memory was released, and not all has come since on every rank"
        )
    found += [text[:_MAX_TEXT] for text in log.failures]
    found += [f"{refit.describe()} is mixed: {refit.left_out()}" for refit in log.left_out]
    if log.running is not None:
        verdict = law.verdict()
        found.append(f"{log.running.describe()} has not ended: {verdict.lacking} of {len(law.ledger.targets)} "
                     f"parameters have not come in it: {listed(verdict.names)}")  # fmt: skip
    shown = log.running or log.last
    return found + (_partly_new(law, shown.since) if shown is not None else [])


def _partly_new(law: Law, since: int) -> list[str]:
    fraction = law.ledger.coverage.new_elements(since) / np.maximum(law.ledger.coverage.sizes, 1)
    mixed = np.flatnonzero(
        (fraction > 0) & (fraction < 1) & (law.ledger.coverage.reached_at >= since)
    )
    found = [
        f"{law.ledger.targets[index].name}: only {fraction[index]:.0%} is new, the rest is older"
        for index in mixed[:MAX_LISTED].tolist()
    ]
    if len(mixed) > MAX_LISTED:
        found.append(f"{len(mixed) - MAX_LISTED} more parameters are partly new")
    return found


def served(law: Law) -> list[dict[str, Any]]:
    """Which refits the parameters come from, the latest first; a parameter by its oldest part."""
    written, oldest = law.ledger.coverage.oldest()
    refits = law.log.refits_of(oldest)
    number = np.searchsorted([refit.since for refit in refits], oldest, "right") - 1
    return [
        {
            "refit": refit.id,
            "version": refit.version,
            "parameters": int((number == at).sum()),
            "example": law.ledger.targets[written[np.argmax(number == at)]].name,
        }
        for at, refit in reversed(list(enumerate(refits)))
    ][:MAX_LISTED]


def last_refit(law: Law) -> dict[str, Any] | None:
    """The refit that runs, or else the one that ended last."""
    current = law.log.running
    refit = current if current is not None and current.calls else law.log.last
    if refit is None:
        return None
    found = law.verdict() if refit is current else refit.found or Verdict()
    seconds = sum(call.seconds for call in refit.calls)
    nbytes = sum(call.nbytes for call in refit.calls)
    return {
        "id": refit.id,
        "version": refit.version,
        "origin": refit.origin.value,
        "partial": refit.is_partial,
        "outcome": refit.outcome.value,
        "complete": refit.is_complete,
        "missing": found.lacking,
        "missing_names": list(found.names),
        "errors": refit.errors[:MAX_LISTED],
        "narrowed": refit.narrowed[:MAX_LISTED],
        "cache_flushed": refit.cache_flushed,
        "seconds": round(seconds, 6),
        "stages": {stage: round(found, 6) for stage, found in refit.stages.items()},
        "bytes": nbytes,
        "gb_per_s": round(nbytes / seconds / 1e9, 3) if seconds else None,
        "tensors": refit.tensors,
        "calls": len(refit.calls),
    }
