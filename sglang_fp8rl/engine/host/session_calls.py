"""Sessions: `begin_weight_update`, `end_weight_update`, and one for a client that opens none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ...errors import Fp8RlError, RefitError
from ...wire.refit_note import note_of
from ..journal import Update
from ..refit import ModelRefit
from .attach import refit_of
from .metrics import observe_refit
from .refit_end import end_session_of
from .request_checks import check_selector

logger = logging.getLogger(__name__)


def in_a_session(original: Callable[..., Any], update: Update) -> Callable[..., Any]:
    """As `original`, in a session that is open for the length of this call of an update."""

    def served(manager: Any, request: Any) -> Any:
        from sglang.srt.managers import io_struct

        selector = getattr(request, "selector", "all")
        manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector=selector))
        try:
            result = original(manager, request)
        finally:
            ended = manager.end_weight_update(io_struct.EndWeightUpdateReqInput())
        if not ended.success:
            update.error = ended.message
            result.success, result.message = False, ended.message
        return result

    return served


def begin_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """`begin_weight_update`: what comes until its end is one refit, with the note that it brings."""
    refit = refit_of(manager.tp_worker.model_runner.model)
    if refit is None or refit.is_updating:  # a session that is opened for one call
        return original(manager, request)
    try:
        note = note_of(request.rid)
        check_selector(manager, request)
    except RefitError as error:
        from sglang.srt.managers import io_struct

        return io_struct.BeginWeightUpdateReqOutput(success=False, message=str(error))
    result = original(manager, request)
    if result.success:
        refit.report.begin_session(note)
    return result


def end_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """`end_weight_update`: the refit ends; FP8 halves that never met fail it."""
    refit = refit_of(manager.tp_worker.model_runner.model)
    if refit is None:
        return original(manager, request)
    result, error = _ended(original, manager, request, refit)
    if refit.is_updating:
        return result  # a session that was opened for one call ends within it
    refit.sender_memory.release()
    if not result.success and error is None:
        return result  # none was open
    end_session_of(manager, refit, result, error)
    refit.kv.settle(manager.flush_cache)
    observe_refit(manager, refit)
    return result


def _ended(
    original: Callable[..., Any], manager: Any, request: Any, refit: ModelRefit
) -> tuple[Any, str | None]:
    """SGLang's answer, or one in its place, and what went wrong in the latter case.

    Side effects on the host: the session is over also where its end failed.
    """
    from sglang.srt.managers import io_struct

    is_through = False
    try:
        with refit.derived.in_place():
            result = original(manager, request)
            is_through = True
        return result, None
    except Exception as error:
        # The boundary of a request, as in `_answer`.
        logger.exception("fp8rl: end_weight_update failed")
        if not is_through:
            manager._session = None
            torch.distributed.barrier(group=manager.tp_cpu_group)
        text = str(error) if isinstance(error, Fp8RlError) else f"{type(error).__name__}: {error}"
        return io_struct.EndWeightUpdateReqOutput(success=False, message=text), text
