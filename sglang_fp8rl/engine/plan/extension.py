"""`GET /fp8rl/plan`: what a trainer may send, of a server that runs."""

from __future__ import annotations

import functools
import json
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from ...wire.plan import PLAN_PATH, RefitPlan
from ..extension import Extension, extensions
from ..host.boundary import Boundary
from ..host.status import internal_states, not_served, refused
from ..refit import ModelRefit
from .document import plan_document

_MARK = "fp8rl-plan:"  # and the digest of the plan that the client knows
_PLAN, _DIGEST, _ERROR = "fp8rl_plan", "fp8rl_plan_digest", "fp8rl_plan_error"


async def serve_plan(request: Any) -> Response:
    """`If-None-Match` with a digest is answered 304 without the document where the server's is the same."""
    known = request.headers.get("if-none-match", "").strip('"')
    state = (await internal_states(_MARK + known))[0]
    if _ERROR in state:
        return refused(state[_ERROR], HTTPStatus.INTERNAL_SERVER_ERROR)
    if _DIGEST not in state:
        return not_served()
    tag = {"ETag": f'"{state[_DIGEST]}"'}
    if _PLAN not in state:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=tag)
    return Response(state[_PLAN], media_type="application/json", headers=tag)


class Plan(Extension):
    """The plan of one model, made when it is first asked for."""

    routes = {PLAN_PATH: serve_plan}  # noqa: RUF012
    mark = _MARK

    def start(self, runner: Any) -> bool:
        return True

    @functools.cached_property
    def made(self) -> RefitPlan:
        refit: ModelRefit = self.refit
        names = refit.learned_names()
        more: dict[str, Any] = {}
        for kind in extensions():
            more |= kind.planned(refit)
        document = plan_document(
            refit.model, names, refit.targets, refit.schemes, refit.options, more
        )
        return RefitPlan.from_dict(document)

    @staticmethod
    def answer(refit: Any, scheduler: Any, asked: str) -> dict[str, Any]:
        boundary = Boundary(scheduler.weight_updater.tp_cpu_group)
        state = boundary.step(_state, refit, asked)
        return state or {_ERROR: " | ".join(boundary.errors)}


def plan_of(refit: ModelRefit) -> RefitPlan:
    """The public document. Raises `HostError` where the model's loaders need values."""
    return next(one.made for one in refit.extensions if isinstance(one, Plan))


def _state(refit: ModelRefit, known: str) -> dict[str, Any]:
    """The plan, for a client that knows the one with the digest `known`."""
    plan = plan_of(refit)
    state: dict[str, Any] = {_DIGEST: plan.digest}
    if known != plan.digest:
        state[_PLAN] = json.dumps(plan.document, ensure_ascii=False)
    return state
