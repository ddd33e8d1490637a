"""This package's routes in SGLang's own HTTP server: `GET /fp8rl/{plan,status,fingerprint}`.

All ask the scheduler, so they answer whatever a launcher did to `/server_info` (veRL's breaks it).
"""

from __future__ import annotations

import sys
from typing import Any

from ...wire.fingerprint import FINGERPRINT_PATH
from ...wire.plan import PLAN_PATH, STATUS_PATH
from .fingerprint_route import serve_fingerprint
from .internal_state import SERVER_MODULE, internal_states, not_served
from .plan_route import serve_plan
from .replicas import status_of_replicas


def add_routes(_: Any, manager: Any, *__: Any, **___: Any) -> None:
    """After the tokenizer manager was made: three more routes, in a process that serves HTTP.

    Side effects on the host: SGLang's FastAPI app gets the routes `GET /fp8rl/plan`,
    `GET /fp8rl/status` and `GET /fp8rl/fingerprint`.
    """
    server = sys.modules.get(SERVER_MODULE)
    if server is None:
        return
    known = {getattr(route, "path", None) for route in server.app.routes}
    for path, serve in _ROUTES.items():
        if path not in known:
            server.app.add_route(path, serve, methods=["GET"])


async def serve_status(request: Any) -> Any:
    """`status_of_replicas` of the sections in `/server_info`; 404 from a server without this method."""
    from starlette.responses import JSONResponse

    states = await internal_states()
    if any("fp8rl" not in state for state in states):
        return not_served()
    return JSONResponse(status_of_replicas([state["fp8rl"] for state in states]))


_ROUTES = {
    PLAN_PATH: serve_plan,
    STATUS_PATH: serve_status,
    FINGERPRINT_PATH: serve_fingerprint,
}
