"""What stands around each update request of SGLang's scheduler."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ...errors import Fp8RlError, RefitError
from ...wire.layout_text import from_text
from ..arrival.bucket import FlatBucket
from ..arrival.sender import sender_of
from ..arrival.update_scope import Origin, UpdateScope
from ..journal import Update
from ..refit import ModelRefit
from .attach import refit_of
from .metrics import observe_refit
from .refit_end import end_request
from .request_checks import check_request, readable_note
from .session_calls import in_a_session
from .shared_memory import checked_shared_memory

logger = logging.getLogger(__name__)

_OUTPUTS = {
    Origin.TENSOR: "UpdateWeightsFromTensorReqOutput",
    Origin.DISTRIBUTED: "UpdateWeightsFromDistributedReqOutput",
    Origin.DISK: "UpdateWeightFromDiskReqOutput",
    Origin.IPC: "UpdateWeightsFromIPCReqOutput",
}
_NEED_SESSIONS = (Origin.TENSOR, Origin.DISTRIBUTED)
_FLUSH_REFUSED = RefitError(
    "the cache",
    "not flushed, for requests are running or queued",
    "the weights of this update are stored, what the old ones had computed is still used",
    "Retract or finish the requests, then call /flush_cache.",
)
_END_WITH_BARRIER = (Origin.TENSOR, Origin.IPC)
_PROCESS_AFTER_LOADING = (Origin.DISK, Origin.IPC)


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
            note=readable_note(request),
            sender=sender_of(request, torch.distributed.get_rank(manager.tp_cpu_group)),
            version=getattr(request, "weight_version", None),
        )
        refit.kv.note_update()
        refit.wait_for_device()
        with refit.during(scope) as update, collector_paused():
            served = in_a_session(original, update) if wants_session else original
            try:
                return _answer(served, manager, request, refit, update)
            finally:
                if scope.is_last_call or update.error is not None:
                    refit.sender_memory.release()

    return hook


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
    is_through = False
    try:
        check_request(manager, request)
        try:
            # From disk and from checkpoint-engine, SGLang processes weights after it loaded them.
            processes = origin in _PROCESS_AFTER_LOADING
            with (
                _default_dtype_kept(),
                _flush_watched(manager, update),
                checked_shared_memory(),
                refit.derived.in_place() if processes else nullcontext(),
            ):
                result = original(manager, request)
                is_through = True
        finally:  # what was stored before an update failed is served too
            _renew_derived(refit, origin)
    except Exception as error:
        # The boundary of a request: today this ends the scheduler and with it the server. It is
        # answered instead, and nothing goes on as if it had worked.
        logger.exception("fp8rl: update_weights_from_%s failed", origin.value)
        is_ours = isinstance(error, Fp8RlError)
        # Before sessions, SGLang said by an error that it could not flush.
        is_flush = update.cache_flushed is False and not (is_ours or is_through)
        told = _FLUSH_REFUSED if is_flush else error if is_ours else _foreign(origin, error)
        result = _failed(origin, str(told))
        update.error = None if is_flush else result.message
        if origin in _END_WITH_BARRIER and not is_through:
            torch.distributed.barrier(group=manager.tp_cpu_group)
    end_request(manager, refit, update, result)
    refit.kv.end_of_request()
    observe_refit(manager, refit, call=origin.value, success=result.success)
    return result


def _renew_derived(refit: ModelRefit, origin: Origin) -> None:
    """Raises an error of ours, which is never taken for a flush that SGLang refused before it."""
    try:
        refit.derived.end_of_update()
    except Fp8RlError:
        raise
    except Exception as error:
        raise _foreign(origin, error) from error


@contextmanager
def _flush_watched(manager: Any, update: Update) -> Iterator[None]:
    """Whether SGLang's flush was refused: weights that are stored are no failed refit for that.

    It says so by `success: false` (0.5.16: by an error), as of weights that are not stored.
    """
    flush = manager.flush_cache

    def flush_cache(*args: Any, **kwargs: Any) -> bool:
        update.cache_flushed = bool(flush(*args, **kwargs))
        return update.cache_flushed

    manager.flush_cache = flush_cache
    try:
        yield
    finally:
        manager.flush_cache = flush


@contextmanager
def _default_dtype_kept() -> Iterator[None]:
    """A reload from disk that fails leaves the model's dtype as torch's default (SGLang 0.5.16), and
    every later forward pass computes with it."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _foreign(origin: Origin, error: Exception) -> RefitError:
    """What SGLang raised by itself, in words that say what to do."""
    return RefitError(
        f"update_weights_from_{origin.value}",
        f"{type(error).__name__}: {error}",
        "what is sent is read as SGLang's serializer writes it, a checkpoint as safetensors does",
        "Send with RefitClient or SGLang's MultiprocessingSerializer; nothing of this call is known to "
        "be stored.",
    )


def _failed(origin: Origin, message: str) -> Any:
    from sglang.srt.managers import io_struct

    output_class = getattr(io_struct, _OUTPUTS[origin])
    extra = {"num_paused_requests": 0} if origin is Origin.DISK else {}
    return output_class(success=False, message=message, **extra)


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
    try:
        model.load_weights(FlatBucket(flat, payload["metadata"]))
    finally:
        if payload.get("is_staged"):
            refit.sender_memory.hold(flat)
    return True, "Success"
