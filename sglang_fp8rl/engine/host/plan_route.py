"""`GET /fp8rl/plan`: the scheduler's plan over SGLang's own HTTP server.

The document of a large model is megabytes, so it is no part of `/server_info`. It travels as the
answer to an internal-state request that is marked by its `rid`. `If-None-Match` with a digest is
answered 304 without the document where the server's is the same.
"""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

from ..refit import ModelRefit
from .internal_state import internal_states, not_served, refused

logger = logging.getLogger(__name__)

_MARK = "fp8rl-plan:"


async def serve_plan(request: Any) -> Any:
    from starlette.responses import Response

    known = request.headers.get("if-none-match", "").strip('"')
    state = (await internal_states(_MARK + known))[0]
    if "fp8rl_plan_error" in state:
        return refused(state["fp8rl_plan_error"], HTTPStatus.INTERNAL_SERVER_ERROR)
    if "fp8rl_plan_digest" not in state:
        return not_served()
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
