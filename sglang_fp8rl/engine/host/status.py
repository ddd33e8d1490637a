"""The section `fp8rl` of `internal_states` in `GET /server_info`, of one scheduler and of all replicas.

Plain types only.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ... import __version__
from ...wire.layout_text import VERSION as FLAT_LAYOUT_VERSION
from ..model.plan_document import module_rows
from ..refit import ModelRefit
from ..report import report_fields
from ..report.refit_record import State

_BEST_TO_WORST = [
    one.value for one in (State.WHOLE, State.OPEN, State.MIXED, State.UNLOADED, State.FAILED)
]


def status_section(
    refit: ModelRefit, *, session_open: bool, replica: int = 0, manager: Any = None
) -> dict[str, Any]:
    """What a user wants to know of a running server, as JSON types.

    Args:
        refit: of the served model.
        session_open: whether `begin_weight_update` was called and `end_weight_update` was not.
        replica: data-parallel rank of the scheduler that says it.
        manager: SGLang's weight updater; None if nothing is to be read off the device.
    """
    report = refit.report
    log, problems = report.log, report_fields.problems(report)
    problems += list(refit.pairs.open_halves().values())
    if session_open:
        problems.append("a weight-update session is open: call end_weight_update()")
    schemes = Counter(scheme.granularity.value for scheme in refit.schemes.values())
    fp8_bytes = sum(target.parameter.numel() for target in refit.targets.values() if target.is_fp8)
    section = {
        "version": __version__,
        "replica": replica,
        "schemes": dict(schemes),
        "fp8_bytes": fp8_bytes,
        "bf16_bytes_replaced": 2 * fp8_bytes,
        "last_refit": report_fields.last_refit(report),
        "last_complete_refit": log.complete
        and {"id": log.complete.id, "version": log.complete.version},
        "served": report_fields.served(report),
        "flat_layout": FLAT_LAYOUT_VERSION,
        "replay": refit.recipes.as_dict(),
        "state": log.state.value,
        "consistent": log.state is State.WHOLE,
        "problems": problems,
        "plan": module_rows(refit.schemes),
    }
    for extension in refit.extensions:
        section |= extension.status(manager)
    return section


def full_section(refit: ModelRefit, scheduler: Any) -> dict[str, Any]:
    """`status_section` of a scheduler."""
    manager = scheduler.weight_updater
    is_open = getattr(manager, "_session", None) is not None
    replica = replica_of(scheduler)
    return status_section(refit, session_open=is_open, replica=replica, manager=manager)


def unread_section(errors: list[str]) -> dict[str, Any]:
    """Where the status can't be read: nobody may take that for weights that are whole."""
    return {
        "version": __version__,
        "replica": 0,
        "state": State.FAILED.value,
        "consistent": False,
        "problems": [f"the status can't be read: {text}" for text in errors],
        "last_refit": None,
    }


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
