"""What answers SGLang's requests that write, release or read served weights: a class in place of its own, and what
follows a flush of the cache.

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
from .request_end import fail_behind, request_end
from .update_request import (
    answer_update,
    are_weights_released,
    check_selector,
    check_weights_are_there,
)


class RefitUpdater(SchedulerWeightUpdaterManager):
    """Requests of an update are answered whatever happens, on every rank alike; a session is one refit."""

    _session: Any

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
            """What comes until its end is one refit, with the note that it brings."""
            original = super().begin_weight_update
            refit = refit_of(self.tp_worker.model_runner.model)
            if refit is None or self._session is not None:
                return original(recv_req)
            boundary = Boundary(self.tp_cpu_group)
            boundary.step(_announced, self, recv_req, refit)
            errors = boundary.failures()
            if not errors:
                result = boundary.step(boundary.asked, original, recv_req)
                errors = boundary.failures()
                if not errors:
                    return result
                self._session = None
            for extension in refit.extensions:
                extension.drop_session()
            return io_struct.BeginWeightUpdateReqOutput(success=False, message=" | ".join(errors))

        def end_weight_update(self, recv_req: Any) -> Any:
            """The refit ends; FP8 halves that never met fail it. The session is over also where its end failed."""
            original = super().end_weight_update
            refit = refit_of(self.tp_worker.model_runner.model)
            if refit is None or self._session is None:
                return original(recv_req)
            marks = [(ANSWERING, perf_counter())]
            update = Update(Origin.TENSOR, in_session=True, ends_session=True, marks=marks)
            boundary, around = Boundary(self.tp_cpu_group), ExitStack()
            boundary.step(_prepare_end, self, refit, around)
            errors = boundary.failures()
            if errors:  # refused: the session stays open
                boundary.step(around.close)
                return io_struct.EndWeightUpdateReqOutput(success=False, message=" | ".join(errors))
            result = boundary.step(boundary.asked, original, recv_req, around=around)
            boundary.step(refit.derived.end_of_update)  # of what SGLang processed at the end
            self._session = None
            if result is None:
                text = " | ".join(boundary.errors)
                result = io_struct.EndWeightUpdateReqOutput(success=False, message=text)
            return request_end(refit)(boundary, self, refit, update, result).answer()

    def release_memory_occupation(self, recv_req: Any) -> Any:
        """Weights that nobody kept have to be sent again, all of them."""
        from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
        from sglang.srt.runtime_context import get_server_args

        original = super().release_memory_occupation
        refit = refit_of(self.tp_worker.model_runner.model)
        are_asked_for = not recv_req.tags or GPU_MEMORY_TYPE_WEIGHTS in recv_req.tags
        is_paged = self.memory_saver_adapter.enabled and not are_weights_released(self)
        is_kept = get_server_args().enable_weights_cpu_backup
        if refit is None or is_kept or not (are_asked_for and is_paged):
            return original(recv_req)
        boundary = Boundary(self.tp_cpu_group)
        boundary.step(refit.derived.kept_copies.keep_constants)
        result = original(recv_req)
        for extension in refit.extensions:
            boundary.step(extension.weights_lost)
        if not get_server_args().enable_draft_weights_cpu_backup:
            boundary.step(lose_drafts)
        # SGLang's answer to this request has no room for an error.
        fail_behind(boundary, self, refit)
        return result

    def resume_memory_occupation(self, recv_req: Any) -> Any:
        """What no update sends comes back with the memory of the weights."""
        result = super().resume_memory_occupation(recv_req)
        refit = refit_of(self.tp_worker.model_runner.model)
        if refit is not None and not are_weights_released(self):
            boundary = Boundary(self.tp_cpu_group)
            boundary.step(refit.derived.kept_copies.put_constants_back)
            fail_behind(boundary, self, refit)
        return result

    # Who reads served weights gets them as they were sent.

    def get_weights_by_name(self, recv_req: Any) -> Any:
        return _read_unfolded(super().get_weights_by_name, self, recv_req)

    def check_weights(self, recv_req: Any) -> Any:
        return _read_unfolded(super().check_weights, self, recv_req)

    def save_remote_model(self, params: Any) -> Any:
        return _read_unfolded(super().save_remote_model, self, params)

    def save_sharded_model(self, params: Any) -> Any:
        return _read_unfolded(super().save_sharded_model, self, params)


def after_flush(is_empty: bool, scheduler: Any, *_: Any, **__: Any) -> bool:
    """`Scheduler.flush_cache`: what it did, on every rank alike. A refit without session or name may end there."""
    refit = refit_of(scheduler.tp_worker.model_runner.model)
    if refit is None or refit.calls.update.origin.is_serving:
        return is_empty  # within a request of an update, which says so itself
    manager = scheduler.weight_updater
    boundary = Boundary(manager.tp_cpu_group)
    if not boundary.on_every_rank(is_empty):
        return False
    for extension in refit.extensions:
        is_empty = extension.cache_is_empty(manager) and is_empty
    return is_empty


def _announced(manager: Any, request: Any, refit: ModelRefit) -> None:
    note = note_of(request.rid)
    check_weights_are_there(manager, "an update writes them")
    check_selector(manager, request)
    for extension in refit.extensions:
        extension.begin_session(note)


def _prepare_end(manager: Any, refit: ModelRefit, around: ExitStack) -> None:
    check_weights_are_there(manager, "the end of a session processes them")
    around.enter_context(refit.derived.in_place())


def _read_unfolded(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    refit = refit_of(manager.tp_worker.model_runner.model)
    if refit is None:
        return original(request)
    around = ExitStack()
    # What fails in the first leaves the weights as they were; in the second it may not.
    reading, changing = Boundary(manager.tp_cpu_group), Boundary(manager.tp_cpu_group)
    reading.step(check_weights_are_there, manager, "this request reads them")
    errors, result = reading.failures(), None
    is_reset, kept = getattr(request, "action", "") == "reset_tensors", refit.derived.kept_copies
    if not errors:
        if is_reset:
            changing.step(kept.keep_constants)
        changing.step(around.enter_context, refit.unfolded())
        if changing.is_fine():
            result = reading.step(original, request)
        changing.step(around.close)
        if is_reset:
            changing.step(kept.put_constants_back)
            selector = getattr(request, "selector", "all")
            if selector != "draft":
                for extension in refit.extensions:
                    changing.step(extension.weights_lost)
            if selector != "target":
                changing.step(lose_drafts)
        errors = [*reading.failures(), *fail_behind(changing, manager, refit)]
    return _not_read(request, errors) if errors else result


def _not_read(request: Any, errors: list[str]) -> Any:
    """The failed answer; of a request by RPC a `RefitError` is raised, which SGLang answers."""
    text = " | ".join(errors)
    if isinstance(request, io_struct.CheckWeightsReqInput):
        return io_struct.CheckWeightsReqOutput(success=False, message=text)
    if isinstance(request, io_struct.GetWeightsByNameReqInput):
        return io_struct.GetWeightsByNameReqOutput(parameter=None)
    raise RefitError("the weights", text, "they were not read", "The server's log says more.")
