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
from itertools import chain
from typing import Any

from starlette.responses import JSONResponse, Response

from ... import __version__
from ...errors import MAX_LISTED
from ...scheme import module_rows
from ...versions import RANKS_ARE_GLOBAL
from ...wire.layout_text import VERSION as FLAT_LAYOUT_VERSION
from ...wire.plan import STATUS_PATH
from ..extension import extensions
from ..refit import ModelRefit, refit_of
from .boundary import Boundary

SERVER_MODULE = "sglang.srt.entrypoints.http_server"


def status_section(refit: ModelRefit, *, replica: int = 0, manager: Any = None) -> dict[str, Any]:
    """What a user wants to know of a running server, as JSON types. `replica` is the data-parallel rank of the scheduler
    that says it, `manager` SGLang's weight updater, or None if nothing is to be said of a session."""
    found = list(refit.pairs.open_halves().values())
    if getattr(manager, "_session", None) is not None:
        found.append("a weight-update session is open: call end_weight_update()")
    fp8_bytes = sum(target.parameter.numel() for target in refit.targets.values() if target.is_fp8)
    section = {
        "version": __version__,
        "replica": replica,
        "schemes": dict(Counter(scheme.name for scheme in refit.schemes.values())),
        "fp8_bytes": fp8_bytes,
        "bf16_bytes_replaced": 2 * fp8_bytes,
        "flat_layout": FLAT_LAYOUT_VERSION,
        "problems": found,
        "unproven": dict(list(refit.derived.kept_copies.unproven.items())[:MAX_LISTED]),
        "plan": module_rows(refit.schemes),
    }
    ours = {extension.section: extension.status() for extension in refit.extensions}
    section |= {kind.section: ours.get(kind.section) for kind in extensions() if kind.section}
    for extension in refit.extensions:
        extension.add_to_status(section)
    return section


def status_of_replicas(sections: list[dict[str, Any]]) -> dict[str, Any]:
    """The section of the replica that serves the worst state, and `replicas`: how many there are.

    Of two that are alike, the lower number goes first.
    """

    def badness(section: dict[str, Any]) -> tuple[int, ...]:
        found = (kind.badness(section) for kind in extensions())
        return *chain.from_iterable(found), -section["replica"]

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
    for extension in refit.extensions:
        if extension.mark is not None and mark.startswith(extension.mark):
            asked = mark.removeprefix(extension.mark)
            result.internal_state = extension.answer(scheduler, asked)
            return result
    updater = scheduler.weight_updater
    boundary = Boundary(updater.tp_cpu_group)
    section = boundary.step(
        lambda: status_section(refit, replica=replica_of(scheduler), manager=updater)
    )
    # What can't be read is not to be taken for weights that are whole.
    result.internal_state["fp8rl"] = section or {
        "version": __version__,
        "replica": 0,
        "state": "failed",
        "consistent": False,
        "problems": [f"the status can't be read: {text}" for text in boundary.errors],
        "last_refit": None,
    }
    return result


def replica_of(scheduler: Any) -> int:
    """Its data-parallel rank; 0 without data parallelism."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel() if RANKS_ARE_GLOBAL else scheduler.ps
    return parallel.dp_rank or 0
