"""What answers SGLang's requests that write, release or read served weights: a class in place of its own.

Each method asks SGLang's own; for models that are served otherwise it does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from ...errors import RefitError
from ...versions import HAS_SESSIONS
from ...wire.refit_note import note_of
from ...wire.stages import ANSWERING
from ..arrival.update import Origin, Update
from ..model.draft import lose_drafts
from ..refit import ModelRefit, refit_of
from .boundary import Boundary
from .refit_end import fail_behind, finish
from .update_request import (
    answer_update,
    are_weights_released,
    check_selector,
    check_weights_are_there,
)


class RefitUpdater(SchedulerWeightUpdaterManager):
    """Requests of an update are answered whatever happens, on every rank alike; a session is one refit."""

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        return answer_update(Origin.TENSOR, super(), self, recv_req)

    def update_weights_from_distributed(self, recv_req: Any) -> Any:
        return answer_update(Origin.DISTRIBUTED, super(), self, recv_req)

    def update_weights_from_disk(self, recv_req: Any) -> Any:
        return answer_update(Origin.DISK, super(), self, recv_req)

    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        return answer_update(Origin.IPC, super(), self, recv_req)

    if HAS_SESSIONS:

        def begin_weight_update(self, recv_req: Any) -> Any:
            return begin_session(super().begin_weight_update, self, recv_req)

        def end_weight_update(self, recv_req: Any) -> Any:
            return end_session(super().end_weight_update, self, recv_req)

    def release_memory_occupation(self, recv_req: Any) -> Any:
        return release_memory(super().release_memory_occupation, self, recv_req)

    def resume_memory_occupation(self, recv_req: Any) -> Any:
        return resume_memory(super().resume_memory_occupation, self, recv_req)

    # Who reads served weights gets them as they were sent.

    def get_weights_by_name(self, recv_req: Any) -> Any:
        return read_unfolded(super().get_weights_by_name, self, recv_req)

    def check_weights(self, recv_req: Any) -> Any:
        return read_unfolded(super().check_weights, self, recv_req)

    def save_remote_model(self, params: Any) -> Any:
        return read_unfolded(super().save_remote_model, self, params)

    def save_sharded_model(self, params: Any) -> Any:
        return read_unfolded(super().save_sharded_model, self, params)


# -- sessions: what comes in between is one refit --------------------------------------------------


def begin_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """`begin_weight_update`: what comes until its end is one refit, with the note that it brings."""
    refit = refit_of(manager.tp_worker.model_runner.model)
    if refit is None or manager._session is not None:
        return original(request)
    boundary = Boundary(manager.tp_cpu_group)
    boundary.step(_announced, manager, request, refit)
    errors = boundary.failures()
    if not errors:
        result = boundary.step(boundary.asked, original, request)
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
    refit = refit_of(manager.tp_worker.model_runner.model)
    if refit is None or manager._session is None:
        return original(request)
    marks = [(ANSWERING, perf_counter())]
    update = Update(Origin.TENSOR, in_session=True, ends_session=True, marks=marks)
    boundary, around = Boundary(manager.tp_cpu_group), ExitStack()
    boundary.step(_prepare_end, manager, refit, around)
    errors = boundary.failures()
    if errors:  # refused: the session stays open
        boundary.step(around.close)
        return io_struct.EndWeightUpdateReqOutput(success=False, message=" | ".join(errors))
    result = boundary.step(boundary.asked, original, request, around=around)
    manager._session = None
    if result is None:
        text = " | ".join(boundary.errors)
        result = io_struct.EndWeightUpdateReqOutput(success=False, message=text)
    return finish(boundary, manager, refit, update, result)


def _prepare_end(manager: Any, refit: ModelRefit, around: ExitStack) -> None:
    check_weights_are_there(manager, "the end of a session processes them")
    around.enter_context(refit.derived.in_place())


# -- beside updates --------------------------------------------------------------------------------


def release_memory(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """`release_memory_occupation`: weights that nobody kept have to be sent again, all of them."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.runtime_context import get_server_args

    refit = refit_of(manager.tp_worker.model_runner.model)
    are_asked_for = not request.tags or GPU_MEMORY_TYPE_WEIGHTS in request.tags
    is_paged = manager.memory_saver_adapter.enabled and not are_weights_released(manager)
    is_kept = get_server_args().enable_weights_cpu_backup
    if refit is None or is_kept or not (are_asked_for and is_paged):
        return original(request)
    boundary = Boundary(manager.tp_cpu_group)
    boundary.step(refit.derived.kept_copies.keep_constants)
    result = original(request)
    boundary.step(refit.report.weights_lost)
    if not get_server_args().enable_draft_weights_cpu_backup:
        boundary.step(lose_drafts)
    # SGLang's answer to this request has no room for an error.
    fail_behind(boundary, refit, None)
    return result


def resume_memory(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """`resume_memory_occupation`: what no update sends comes back with the memory of the weights."""
    result = original(request)
    refit = refit_of(manager.tp_worker.model_runner.model)
    if refit is not None and not are_weights_released(manager):
        boundary = Boundary(manager.tp_cpu_group)
        boundary.step(refit.derived.kept_copies.put_constants_back)
        fail_behind(boundary, refit, None)
    return result


def read_unfolded(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Requests that read the served weights get them as they were sent."""
    refit = refit_of(manager.tp_worker.model_runner.model)
    if refit is None:
        return original(request)
    around = ExitStack()
    # What fails in the first leaves the weights as they were; in the second it may not.
    reading, changing = Boundary(manager.tp_cpu_group), Boundary(manager.tp_cpu_group)
    reading.step(check_weights_are_there, manager, "this request reads them")
    errors, result = reading.failures(), None
    if not errors:
        changing.step(around.enter_context, refit.unfolded())
        if changing.is_fine():
            result = reading.step(original, request)
        changing.step(around.close)
        if getattr(request, "action", "") == "reset_tensors":
            changing.step(refit.report.weights_lost)
        errors = [*reading.failures(), *fail_behind(changing, refit, None)]
    return _not_read(request, errors) if errors else result


def _not_read(request: Any, errors: list[str]) -> Any:
    """The failed answer.

    Raises:
        RefitError: to a request by RPC, for which SGLang answers it.
    """
    text = " | ".join(errors)
    if isinstance(request, io_struct.CheckWeightsReqInput):
        return io_struct.CheckWeightsReqOutput(success=False, message=text)
    if isinstance(request, io_struct.GetWeightsByNameReqInput):
        return io_struct.GetWeightsByNameReqOutput(parameter=None)
    raise RefitError("the weights", text, "they were not read", "The server's log says more.")
