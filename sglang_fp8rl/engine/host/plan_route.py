"""`GET /fp8rl/plan`: the scheduler's plan over SGLang's own HTTP server.

The document of a large model is megabytes, so it is no part of `/server_info`. It travels as the
answer to an internal-state request that is marked by its `rid`. `If-None-Match` with a digest is
answered 304 without the document where the server's is the same.
"""

from __future__ import annotations

import json
import logging
import sys
from http import HTTPStatus
from typing import Any

from ...wire.plan import PLAN_PATH
from ..refit import ModelRefit

logger = logging.getLogger(__name__)

_SERVER_MODULE = "sglang.srt.entrypoints.http_server"
_MARK = "fp8rl-plan:"


def add_plan_route(_: Any, manager: Any, *__: Any, **___: Any) -> None:
    """After the tokenizer manager was made: one more route, in a process that serves HTTP.

    Side effects on the host: SGLang's FastAPI app gets the route `GET /fp8rl/plan`.
    """
    server = sys.modules.get(_SERVER_MODULE)
    if server is None or any(
        getattr(route, "path", None) == PLAN_PATH for route in server.app.routes
    ):
        return
    server.app.add_route(PLAN_PATH, _serve_plan, methods=["GET"])


async def _serve_plan(request: Any) -> Any:
    from sglang.srt.managers.io_struct import GetInternalStateReq
    from starlette.responses import JSONResponse, Response

    manager: Any = sys.modules[_SERVER_MODULE].get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    known = request.headers.get("if-none-match", "").strip('"')
    answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=_MARK + known))
    state = answers[0].internal_state
    if "fp8rl_plan_error" in state:
        answer = {"success": False, "message": state["fp8rl_plan_error"]}
        return JSONResponse(answer, HTTPStatus.INTERNAL_SERVER_ERROR)
    if "fp8rl_plan_digest" not in state:
        message = "the server runs without --quantization fp8_blockwise_online"
        return JSONResponse({"success": False, "message": message}, HTTPStatus.NOT_FOUND)
    tag = {"ETag": f'"{state["fp8rl_plan_digest"]}"'}
    if "fp8rl_plan" not in state:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=tag)
    return Response(state["fp8rl_plan"], media_type="application/json", headers=tag)


def plan_state(refit: ModelRefit, request: Any) -> dict[str, Any] | None:
    """What the scheduler answers to a request for the plan; None if `request` is no such request."""
    mark = getattr(request, "rid", None) or ""
    if not mark.startswith(_MARK):
        return None
    try:
        plan = refit.plan()
    except Exception as error:
        # The boundary of a request: a plan that can't be made must not end the scheduler.
        logger.exception("fp8rl: no plan")
        return {"fp8rl_plan_error": str(error) or type(error).__name__}
    state: dict[str, Any] = {"fp8rl_plan_digest": plan.digest}
    if mark.removeprefix(_MARK) != plan.digest:
        state["fp8rl_plan"] = json.dumps(plan.document, ensure_ascii=False)
    return state
