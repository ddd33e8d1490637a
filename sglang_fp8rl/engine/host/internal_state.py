"""What the process that serves HTTP asks of the scheduler, by SGLang's own internal-state request."""

from __future__ import annotations

import sys
from http import HTTPStatus
from typing import Any

SERVER_MODULE = "sglang.srt.entrypoints.http_server"


async def internal_states(mark: str | None = None) -> list[dict[str, Any]]:
    """The internal state of each data-parallel replica's scheduler, as in `/server_info`.

    Args:
        mark: travels as the request's `rid`, for an answer of another kind (see `plan_route`).
    """
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager: Any = sys.modules[SERVER_MODULE].get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=mark))
    return [answer.internal_state for answer in answers]


def refused(message: str, status: HTTPStatus) -> Any:
    """An answer that says what is wrong, as SGLang's own."""
    from starlette.responses import JSONResponse

    return JSONResponse({"success": False, "message": message}, status)


def not_served() -> Any:
    """The answer of a server that runs without this method."""
    message = "the server runs without --quantization fp8_blockwise_online"
    return refused(message, HTTPStatus.NOT_FOUND)
