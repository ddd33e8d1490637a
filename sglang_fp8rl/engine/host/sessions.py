"""Sessions that a client opens and closes: what comes in between is one refit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ...wire.refit_note import note_of
from ..arrival.update import Origin, Update
from ..refit import ModelRefit, refit_of
from .boundary import Boundary
from .metrics import observe_refit
from .refit_end import end_request, fail_behind
from .request_checks import check_selector, check_weights_are_there


def begin_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """`begin_weight_update`: what comes until its end is one refit, with the note that it brings."""
    from sglang.srt.managers import io_struct

    refit = refit_of(manager.tp_worker.model_runner.model)
    if refit is None or manager._session is not None:
        return original(request)
    boundary = Boundary(manager.tp_cpu_group)
    boundary.step(_announced, manager, request, refit)
    errors, result = boundary.failures(), None
    if not errors:
        result = boundary.step(
            boundary.asked, original, request, around=ExitStack(), has_barrier=True
        )
        errors = boundary.failures()
        if not errors:
            return result
        manager._session = None
    refit.report.log.session = None
    return io_struct.BeginWeightUpdateReqOutput(success=False, message=" | ".join(errors))


def _announced(manager: Any, request: Any, refit: ModelRefit) -> None:
    note = note_of(request.rid)
    check_weights_are_there(manager, "an update writes them")
    check_selector(manager, request)
    refit.report.begin_session(note, refit.memory_number() if note is None else None)


def end_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """`end_weight_update`: the refit ends; FP8 halves that never met fail it.

    Side effects on the host: the session is over also where its end failed.
    """
    from sglang.srt.managers import io_struct

    refit = refit_of(manager.tp_worker.model_runner.model)
    if refit is None or manager._session is None:
        return original(request)
    boundary, around = Boundary(manager.tp_cpu_group), ExitStack()
    boundary.step(_prepare_end, manager, refit, around)
    errors = boundary.failures()
    if errors:  # refused: the session stays open
        boundary.step(around.close)
        return io_struct.EndWeightUpdateReqOutput(success=False, message=" | ".join(errors))
    result = boundary.step(boundary.asked, original, request, around=around, has_barrier=True)
    manager._session = None
    if result is None:
        text = " | ".join(boundary.errors)
        result = io_struct.EndWeightUpdateReqOutput(success=False, message=text)
    boundary.step(refit.sender_memory.release)
    update = Update(Origin.TENSOR, in_session=True, ends_session=True)
    ended = end_request(boundary, manager, refit, update, result)
    refit.report.log.session = None  # it is over, whatever was raised there
    for extension in refit.extensions:
        boundary.step(extension.end_session, manager)
    boundary.step(observe_refit, manager, refit)
    fail_behind(boundary, refit, ended, result)
    return result


def _prepare_end(manager: Any, refit: ModelRefit, around: ExitStack) -> None:
    check_weights_are_there(manager, "the end of a session processes them")
    around.enter_context(refit.derived.in_place())
