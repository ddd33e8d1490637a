"""The section `fp8rl` of `internal_states` in `GET /server_info`. Plain types only."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ... import __version__
from ...wire.layout_text import VERSION as FLAT_LAYOUT_VERSION
from ..kv_scales.status import kv_section
from ..kv_scales.stored_codes import stored_codes
from ..model.plan_document import module_rows
from ..refit import ModelRefit
from ..report import report_fields
from ..report.refit_record import State
from .attach import refit_of
from .fingerprint_route import fingerprint_state
from .plan_route import plan_state
from .replicas import replica_of


def status_section(refit: ModelRefit, *, session_open: bool, replica: int = 0) -> dict[str, Any]:
    """What a user wants to know of a running server, as JSON types.

    Args:
        refit: of the served model.
        session_open: whether `begin_weight_update` was called and `end_weight_update` was not.
        replica: data-parallel rank of the scheduler that says it.
    """
    report = refit.report
    log, problems = report.log, report_fields.problems(report)
    problems += list(refit.pairs.open_halves().values())
    if session_open:
        problems.append("a weight-update session is open: call end_weight_update()")
    schemes = Counter(scheme.granularity.value for scheme in refit.schemes.values())
    return {
        "version": __version__,
        "replica": replica,
        "schemes": dict(schemes),
        "fp8_bytes": sum(
            target.parameter.numel() for target in refit.targets.values() if target.is_fp8
        ),
        "bf16_bytes_replaced": sum(
            2 * target.parameter.numel() for target in refit.targets.values() if target.is_fp8
        ),
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
        "kv_scales": kv_section(refit.kv, refit.sent_scales, refit.calibration),
    }


def stored_section(manager: Any, refit: ModelRefit) -> list[dict[str, Any]] | None:
    """What lies in the FP8 cache; None while its memory is released, when nothing of it may be read.

    Args:
        manager: SGLang's weight updater.
    """
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    if GPU_MEMORY_TYPE_KV_CACHE in manager.offload_tags:
        return None
    return stored_codes(manager.tp_worker.model_runner.token_to_kv_pool, refit.kv.layers)


def add_status(result: Any, scheduler: Any, recv_req: Any = None) -> Any:
    """`GET /server_info`: one more section; or the plan, to a request for it."""
    refit = refit_of(scheduler.tp_worker.model_runner.model)
    if refit is None:
        return result
    plan = plan_state(refit, recv_req)
    if plan is not None:
        result.internal_state = plan
        return result
    fingerprint = fingerprint_state(refit, scheduler, recv_req)
    if fingerprint is not None:
        result.internal_state = fingerprint
        return result
    session = getattr(scheduler.weight_updater, "_session", None)
    section = status_section(refit, session_open=session is not None, replica=replica_of(scheduler))
    if refit.kv.is_active:
        section["kv_scales"]["stored"] = stored_section(scheduler.weight_updater, refit)
    result.internal_state["fp8rl"] = section
    return result
