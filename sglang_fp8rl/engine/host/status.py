"""What this package says of a running server: its status, and routes in SGLang's HTTP server to that and more.

The status is the section `fp8rl` of `internal_states` in `GET /server_info`, of one scheduler and of all replicas; plain types only.
All routes ask the scheduler, so they answer whatever a launcher did to `/server_info` (veRL's breaks it): by
SGLang's own internal-state request, whose `rid` marks it where an answer of another kind than the status is
meant: the plan of a large model is megabytes, and no part of `/server_info`.
"""

from __future__ import annotations

import sys
from collections import Counter
from http import HTTPStatus
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response

from ... import __version__
from ...errors import listed
from ...scheme import module_rows
from ...versions import RANKS_ARE_GLOBAL
from ...wire.layout_text import VERSION as FLAT_LAYOUT_VERSION
from ...wire.plan import STATUS_PATH
from ..extension import extensions
from ..model.draft import lost_of_drafts
from ..refit import ModelRefit, refit_of
from ..report.law import MAX_LISTED
from ..report.refit_record import State, Verdict
from ..report.report import RefitReport
from .boundary import Boundary

SERVER_MODULE = "sglang.srt.entrypoints.http_server"
_MAX_TEXT = 500
_UNLOADED = "weights that were never loaded (dummy weights, or memory that was released?): no complete refit has come since"


def status_section(refit: ModelRefit, *, replica: int = 0, manager: Any = None) -> dict[str, Any]:
    """What a user wants to know of a running server, as JSON types.

    Args:
        replica: data-parallel rank of the scheduler that says it.
        manager: SGLang's weight updater; None if nothing is to be said of a session.
    """
    report, log = refit.report, refit.report.log
    found = [*problems(report), *refit.pairs.open_halves().values()]
    if getattr(manager, "_session", None) is not None:
        found.append("a weight-update session is open: call end_weight_update()")
    fp8_bytes = sum(target.parameter.numel() for target in refit.targets.values() if target.is_fp8)
    section = {
        "version": __version__,
        "replica": replica,
        "schemes": dict(Counter(scheme.name for scheme in refit.schemes.values())),
        "fp8_bytes": fp8_bytes,
        "bf16_bytes_replaced": 2 * fp8_bytes,
        "last_refit": last_refit(report),
        "last_complete_refit": log.complete
        and {"id": log.complete.id, "version": log.complete.version},
        "served": served(report),
        "flat_layout": FLAT_LAYOUT_VERSION,
        "state": log.state.value,
        "consistent": log.state is State.WHOLE,
        "problems": found,
        "unproven": dict(list(refit.derived.kept_copies.unproven.items())[:MAX_LISTED]),
        "plan": module_rows(refit.schemes),
    }
    ours = {extension.section: extension.status() for extension in refit.extensions}
    return section | {kind.section: ours.get(kind.section) for kind in extensions() if kind.section}


def problems(report: RefitReport) -> list[str]:
    """Why the served weights are not of one piece; empty if they are."""
    log = report.log
    if log.state is State.WHOLE:
        return []
    found = [_UNLOADED] if log.is_unloaded else []
    lost = lost_of_drafts()
    if lost:
        found.append(
            f"the draft model's memory was released, and {listed(lost)} have not come since"
        )
    found += [text[:_MAX_TEXT] for text in log.failures]
    found += [f"{refit.describe()} is mixed: {refit.left_out()}" for refit in log.left_out]
    if log.running is not None:
        verdict = report.verdict()
        found.append(f"{log.running.describe()} has not ended: {verdict.lacking} of {len(report.targets)} "
                     f"parameters have not come in it: {listed(verdict.names)}")  # fmt: skip
    shown = log.running or log.last
    return found + (_partly_new(report, shown.since) if shown is not None else [])


def _partly_new(report: RefitReport, since: int) -> list[str]:
    fraction = report.coverage.new_elements(since) / np.maximum(report.coverage.sizes, 1)
    mixed = np.flatnonzero((fraction > 0) & (fraction < 1) & (report.coverage.reached_at >= since))
    found = [
        f"{report.targets[index].name}: only {fraction[index]:.0%} is new, the rest is older"
        for index in mixed[:MAX_LISTED].tolist()
    ]
    if len(mixed) > MAX_LISTED:
        found.append(f"{len(mixed) - MAX_LISTED} more parameters are partly new")
    return found


def served(report: RefitReport) -> list[dict[str, Any]]:
    """Which refits the parameters come from, the latest first; a parameter by its oldest part."""
    written, oldest = report.coverage.oldest()
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
    refit = current if current is not None and current.calls else report.log.last
    if refit is None:
        return None
    found = report.verdict() if refit is current else refit.found or Verdict()
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


def status_of_replicas(sections: list[dict[str, Any]]) -> dict[str, Any]:
    """The section of the replica that serves the worst state, and `replicas`: how many there are.

    Of two that are alike, the one whose cache was not flushed goes first, then the lower number.
    """
    states = [state.value for state in State]

    def badness(section: dict[str, Any]) -> tuple[int, bool, int]:
        is_stale = (section["last_refit"] or {}).get("cache_flushed") is False
        return states.index(section["state"]), is_stale, -section["replica"]

    worst = max(sections, key=badness)
    return {**worst, "replicas": len(sections)}


# -- in the process that serves HTTP ---------------------------------------------------------------


def add_routes(_: Any, manager: Any, *__: Any, **___: Any) -> None:
    """After the tokenizer manager was made: SGLang's app gets more routes, in a process that serves HTTP."""
    server = sys.modules.get(SERVER_MODULE)
    if server is None:
        return
    from sglang.srt.utils.auth import AuthLevel, auth_level

    routes: dict[str, Any] = {STATUS_PATH: serve_status}
    for extension in extensions():
        routes |= extension.routes
        for path, serve in extension.admin_routes.items():
            routes[path] = auth_level(AuthLevel.ADMIN_OPTIONAL)(serve)
    for path, serve in routes.items():
        server.app.add_route(path, serve, methods=["GET"])


async def serve_status(request: Any) -> Response:
    """`status_of_replicas` of the sections in `/server_info`; 404 from a server without this method."""
    states = await internal_states()
    if any("fp8rl" not in state for state in states):
        return not_served()
    return JSONResponse(status_of_replicas([state["fp8rl"] for state in states]))


async def internal_states(mark: str | None = None) -> list[dict[str, Any]]:
    """The internal state of each data-parallel replica's scheduler, as in `/server_info`.

    Args:
        mark: travels as the request's `rid`, for an answer of another kind.
    """
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager = sys.modules[SERVER_MODULE].get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=mark))
    return [answer.internal_state for answer in answers]


def refused(message: str, status: HTTPStatus) -> Response:
    """An answer that says what is wrong, as SGLang's own."""
    return JSONResponse({"success": False, "message": message}, status)


def not_served() -> Response:
    """The answer of a server that runs without this method."""
    message = "the server runs without --quantization fp8_blockwise_online"
    return refused(message, HTTPStatus.NOT_FOUND)


# -- in each scheduler -----------------------------------------------------------------------------


def add_status(result: Any, scheduler: Any, recv_req: Any = None) -> Any:
    """`GET /server_info`: one more section; or what an extension has, to a request for it."""
    refit = refit_of(scheduler.tp_worker.model_runner.model)
    if refit is None:
        return result
    mark = getattr(recv_req, "rid", None) or ""
    for kind in extensions():
        if kind.mark is not None and mark.startswith(kind.mark):
            result.internal_state = kind.answer(refit, scheduler, mark.removeprefix(kind.mark))
            return result
    boundary = Boundary(scheduler.weight_updater.tp_cpu_group)
    section = boundary.step(_status_of, scheduler, refit)
    # What can't be read is not to be taken for weights that are whole.
    result.internal_state["fp8rl"] = section or {
        "version": __version__,
        "replica": 0,
        "state": State.FAILED.value,
        "consistent": False,
        "problems": [f"the status can't be read: {text}" for text in boundary.errors],
        "last_refit": None,
    }
    return result


def _status_of(scheduler: Any, refit: ModelRefit) -> dict[str, Any]:
    return status_section(refit, replica=replica_of(scheduler), manager=scheduler.weight_updater)


def replica_of(scheduler: Any) -> int:
    """Its data-parallel rank; 0 without data parallelism."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel() if RANKS_ARE_GLOBAL else scheduler.ps
    return parallel.dp_rank or 0
