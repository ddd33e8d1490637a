"""What the process that serves HTTP asks of the scheduler, by SGLang's own internal-state request."""

from __future__ import annotations

import sys
from http import HTTPStatus
from typing import Any

SERVER_MODULE = "sglang.srt.entrypoints.http_server"


async def internal_state(mark: str | None = None) -> dict[str, Any]:
    """The internal state of the first scheduler, as in `/server_info`.

    Args:
        mark: travels as the request's `rid`, for an answer of another kind (see `plan_route`).
    """
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager: Any = sys.modules[SERVER_MODULE].get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=mark))
    return answers[0].internal_state


def not_served() -> Any:
    """The answer of a server that runs without this method."""
    from starlette.responses import JSONResponse

    message = "the server runs without --quantization fp8_blockwise_online"
    return JSONResponse({"success": False, "message": message}, HTTPStatus.NOT_FOUND)
