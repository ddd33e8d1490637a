"""What the status section says of the refits. Reads a report; what the running refit lacks is counted anew."""

from __future__ import annotations

from typing import Any

import numpy as np

from .coverage import NEVER
from .law import MAX_LISTED
from .refit_record import State, Verdict
from .report import RefitReport

_MAX_TEXT = 500


def problems(report: RefitReport) -> list[str]:
    """Why the served weights are not of one piece; empty if they are."""
    log = report.log
    if log.state is State.WHOLE:
        return []
    found = [_unloaded(report)] if log.is_unloaded else []
    found += [text[:_MAX_TEXT] for text in log.failures]
    found += [f"{refit.describe()} is mixed: {refit.left_out()}" for refit in log.left_out]
    shown = log.running or log.last
    if log.running is not None:
        found.append(f"{log.running.describe()} has not ended: {report.lacking().sum()} of "
                     f"{len(report.targets)} parameters have not come in it")  # fmt: skip
    return found + (_partly_new(report, shown.since) if shown is not None else [])


def _unloaded(report: RefitReport) -> str:
    is_fp8 = np.array([target.is_fp8 for target in report.targets], bool)
    never = np.flatnonzero(is_fp8 & (report.reached_at == NEVER))
    if not len(never):
        return "no complete refit since dummy weights were loaded or their memory was released"
    return (
        f"{len(never)} of {is_fp8.sum()} FP8 weights were never loaded "
        f"(dummy weights, or memory that was released?), for example {report.targets[never[0]].name}"
    )


def _partly_new(report: RefitReport, since: int) -> list[str]:
    fraction = report.coverage.new_fraction(since)
    mixed = np.flatnonzero((fraction > 0) & (fraction < 1) & (report.reached_at >= since))
    found = []
    for index in mixed[:MAX_LISTED].tolist():
        boxes = ", ".join(map(str, report.coverage.new_regions(index, since)[:4]))
        found.append(
            f"{report.targets[index].name}: only {fraction[index]:.0%} is new ({boxes}), "
            "the rest is older"
        )
    if len(mixed) > MAX_LISTED:
        found.append(f"{len(mixed) - MAX_LISTED} more parameters are partly new")
    return found


def served(report: RefitReport) -> list[dict[str, Any]]:
    """Which refits the parameters come from, the latest first; a parameter by its oldest part."""
    written, oldest = report.oldest()
    refits = report.log.refits_of(oldest)
    number = np.searchsorted([refit.since for refit in refits], oldest, "right") - 1
    return [
        {
            "refit": refit.id,
            "version": refit.version,
            "parameters": int((number == at).sum()),
            "example": report.targets[written[np.argmax(number == at)]].name,
        }
        for at, refit in reversed(list(enumerate(refits)))
    ][:MAX_LISTED]


def last_refit(report: RefitReport) -> dict[str, Any] | None:
    """The refit that runs, or else the one that ended last."""
    current = report.log.running
    refit = current if current is not None and current.parts else report.log.last
    if refit is None:
        return None
    found = report.verdict() if refit is current else refit.found or Verdict()
    seconds = sum(part.seconds for part in refit.parts)
    nbytes = sum(part.nbytes for part in refit.parts)
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
        "cache_flushed": refit.cache_flushed,
        "seconds": round(seconds, 6),
        "bytes": nbytes,
        "gb_per_s": round(nbytes / seconds / 1e9, 3) if seconds else None,
        "tensors": refit.tensors,
        "calls": len(refit.parts),
        **refit.noise.as_dict(),
    }
