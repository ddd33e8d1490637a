"""Data-parallel replicas: which one a scheduler is, and one status for all: that of the worst."""

from __future__ import annotations

from typing import Any

from ..report.refit_record import State

_BEST_TO_WORST = [
    one.value for one in (State.WHOLE, State.OPEN, State.MIXED, State.UNLOADED, State.FAILED)
]


def replica_of(scheduler: Any) -> int:
    """Its data-parallel rank; 0 without data parallelism."""
    from sglang.srt.runtime_context import get_parallel

    # SGLang before 0.5.23 may keep it in the scheduler's own `ps`.
    parallel = getattr(scheduler, "ps", None) or get_parallel()
    return parallel.dp_rank or 0


def status_of_replicas(sections: list[dict[str, Any]]) -> dict[str, Any]:
    """The section of the replica that serves the worst state, and `replicas`: how many there are.

    Args:
        sections: as `status_section`, one per replica in any order; at least one. The section's own
            `replica` says whose it is. Of two that are alike, the one whose cache was not flushed goes
            first, then the lower number.
    """
    worst = max(sections, key=_badness)
    return {**worst, "replicas": len(sections)}


def _badness(section: dict[str, Any]) -> tuple[int, bool, int]:
    last = section["last_refit"] or {}
    return (
        _BEST_TO_WORST.index(section["state"]),
        last.get("cache_flushed") is False,
        -section["replica"],
    )
