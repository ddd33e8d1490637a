"""What stands around each update request of SGLang's scheduler."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ...errors import RefitError
from ...wire.layout_text import from_text
from ..arrival.bucket import FlatBucket
from ..arrival.update_scope import Origin, UpdateScope
from ..journal import Update
from ..refit import ModelRefit
from .attach import refit_of
from .metrics import observe_refit

logger = logging.getLogger(__name__)

_OUTPUTS = {
    Origin.TENSOR: "UpdateWeightsFromTensorReqOutput",
    Origin.DISTRIBUTED: "UpdateWeightsFromDistributedReqOutput",
    Origin.DISK: "UpdateWeightFromDiskReqOutput",
    Origin.IPC: "UpdateWeightsFromIPCReqOutput",
}
_NEED_SESSIONS = (Origin.TENSOR, Origin.DISTRIBUTED)
_END_WITH_BARRIER = (Origin.TENSOR, Origin.IPC)


def update_hook(origin: Origin) -> Callable[..., Any]:
    """Around one kind of update: answered whatever happens, on every rank alike.

    A client that opened no session gets one for the length of its call, where SGLang asks for one.
    """

    def hook(original: Callable[..., Any], manager: Any, request: Any) -> Any:
        refit = refit_of(manager.tp_worker.model_runner.model)
        if refit is None:
            return original(manager, request)
        wants_session = origin in _NEED_SESSIONS and getattr(manager, "_session", 0) is None
        scope = UpdateScope(
            origin,
            in_session=getattr(manager, "_session", None) is not None,
            # A client without sessions marks its last bucket by asking for the cache flush.
            is_last_call=getattr(request, "flush_cache", True),
        )
        session = _session_of_its_own(manager, request) if wants_session else nullcontext()
        with refit.during(scope) as update, collector_paused(), session:
            return _answer(original, manager, request, refit, update)

    return hook


@contextmanager
def _session_of_its_own(manager: Any, request: Any) -> Iterator[None]:
    from sglang.srt.managers import io_struct

    selector = getattr(request, "selector", "all")
    manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector=selector))
    try:
        yield
    finally:
        manager.end_weight_update(io_struct.EndWeightUpdateReqInput())


@contextmanager
def collector_paused() -> Iterator[None]:
    """Of 18,000 names, Python's collector takes ten times as long as unpickling them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _answer(
    original: Callable[..., Any], manager: Any, request: Any, refit: ModelRefit, update: Update
) -> Any:
    origin = update.scope.origin
    try:
        _check_load_format(request)
        try:
            # Reloading from disk processes weights after it loaded them; all else only loads.
            in_place = refit.derived.in_place() if origin is Origin.DISK else nullcontext()
            with _default_dtype_kept(), in_place:
                result = original(manager, request)
        finally:  # what was stored before an update failed is served too
            refit.derived.end_of_update()
    except Exception as error:
        # The boundary of a request: today this ends the scheduler and with it the server. It is
        # answered instead, and nothing goes on as if it had worked.
        logger.exception("fp8rl: update_weights_from_%s failed", origin.value)
        result = _failed(origin, str(error) or type(error).__name__)
        if origin in _END_WITH_BARRIER:
            torch.distributed.barrier(group=manager.tp_cpu_group)
    if not result.success and not update.is_recorded and not update.calls:
        # Refused before any weight was looked at. (What is stored and could not be flushed is not.)
        refit.report.refused([result.message])
    _ask_other_ranks(manager, refit, result)
    observe_refit(manager, refit, call=origin.value, success=result.success)
    return result


@contextmanager
def _default_dtype_kept() -> Iterator[None]:
    """A reload from disk that fails leaves the model's dtype as torch's default (SGLang 0.5.16), and
    every later forward pass computes with it."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _check_load_format(request: Any) -> None:
    if getattr(request, "load_format", None) == "direct":
        raise RefitError(
            "load_format",
            "'direct'",
            "it copies into parameters and would leave FP8 scales behind",
            "Leave load_format out, or use 'flattened_bucket'.",
        )


def _failed(origin: Origin, message: str) -> Any:
    from sglang.srt.managers import io_struct

    output_class = getattr(io_struct, _OUTPUTS[origin])
    extra = {"num_paused_requests": 0} if origin is Origin.DISK else {}
    return output_class(success=False, message=message, **extra)


def _ask_other_ranks(manager: Any, refit: ModelRefit, result: Any) -> None:
    """Only rank 0's answer reaches the client, and a NaN may be in a shard that rank 0 never sees."""
    group = manager.tp_cpu_group
    size, own = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    if size == 1:
        return
    message = None if result.success else result.message
    gathered: list[Any] = [None] * size
    unmended = list(refit.report.failed.values())
    torch.distributed.all_gather_object(gathered, (message, unmended), group=group)
    others = [(rank, *said) for rank, said in enumerate(gathered) if rank != own]
    refit.report.other_ranks(
        [f"tp_rank {rank}: {line}" for rank, _, lines in others for line in lines]
    )
    failed = [f"tp_rank {rank}: {text}" for rank, text, _ in others if text is not None]
    if failed and result.success:
        result.success, result.message = False, " | ".join(failed)


def end_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """`end_weight_update`: FP8 halves that never met fail the session."""
    refit = refit_of(manager.tp_worker.model_runner.model)
    with refit.derived.in_place() if refit is not None else nullcontext():
        result = original(manager, request)
    if refit is None or not result.success or refit.is_updating:
        return result  # a session that was opened for one call ends within it
    missing = list(refit.audit.give_up_halves().values())
    if missing:
        refit.report.refused(missing)
        result.success, result.message = False, " | ".join(missing)
    observe_refit(manager, refit)
    return result


def note_released_weights(result: Any, manager: Any, request: Any) -> Any:
    """`release_memory_occupation`: weights that nobody kept have to be sent again, all of them."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.runtime_context import get_server_args

    refit = refit_of(manager.tp_worker.model_runner.model)
    are_released = not request.tags or GPU_MEMORY_TYPE_WEIGHTS in request.tags
    is_paged = manager.memory_saver_adapter.enabled
    is_kept = get_server_args().enable_weights_cpu_backup
    if refit is not None and are_released and is_paged and not is_kept:
        refit.report.weights_lost()
    return result


def flattened_bucket(original: Callable[..., Any], updater: Any, *args: Any, **kw: Any) -> Any:
    """A flattened bucket goes to `load_weights` as it is: SGLang would take it apart first."""
    payload = args[0] if args else kw["flattened_tensor_bucket_dict"]
    model = updater.get_model()
    refit = refit_of(model)
    flat = payload["flattened_tensor"]
    if refit is None and isinstance(payload["metadata"], str):
        payload = {**payload, "metadata": from_text(payload["metadata"])}
        return original(updater, payload)
    is_plain = flat.dtype == torch.uint8 and flat.dim() == 1 and flat.is_contiguous()
    if refit is None or not is_plain:
        return original(updater, *args, **kw)
    model.load_weights(FlatBucket(flat, payload["metadata"]))
    return True, "Success"
