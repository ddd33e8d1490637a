"""What stands around each update request and each session of SGLang's scheduler."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

from ...errors import Fp8RlError, RefitError, as_text
from ...wire.refit_note import note_of
from ..arrival.update_scope import Origin, UpdateScope
from ..native.call import Update
from ..refit import ModelRefit, refit_of
from .around_request import (
    checked_shared_memory,
    collector_paused,
    custom_loader_watched,
    default_dtype_kept,
    flush_watched,
)
from .boundary import Boundary
from .metrics import observe_refit
from .refit_end import end_request, end_session_of, fail_behind
from .request_checks import check_request, check_selector, check_weights_are_there, readable_note

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


def answer_update(origin: Origin, original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Answer one update whatever happens, on every rank alike.

    A client that opened no session gets one for the length of its call, where SGLang asks for one.
    """
    refit = refit_of(manager.tp_worker.model_runner.model)
    if refit is None:
        return original(request)
    return _UpdateRequest(origin, original, manager, request, refit).answer()


class _UpdateRequest:
    """One request on one rank."""

    def __init__(
        self,
        origin: Origin,
        original: Callable[..., Any],
        manager: Any,
        request: Any,
        refit: ModelRefit,
    ) -> None:
        self._original, self._manager, self._request = original, manager, request
        self._refit, self._origin = refit, origin
        self._boundary = Boundary(manager.tp_cpu_group)
        self._update = Update(UpdateScope(origin))
        self._around, self._around_host = ExitStack(), ExitStack()
        is_without = getattr(manager, "_session", 0) is None
        self._wants_session = is_without and origin in _NEED_SESSIONS

    def answer(self) -> Any:
        boundary, refit, manager = self._boundary, self._refit, self._manager
        boundary.step(self._prepare)
        is_asked = boundary.is_fine()
        result = self._asked() if is_asked else boundary.step(self._around_host.close)
        update = self._update
        if result is None:
            result = failed_update(self._origin, " | ".join(boundary.errors))
        end_request(boundary, manager, refit, update, result, is_asked=is_asked)
        for extension in refit.extensions:
            boundary.step(extension.end_request)
        boundary.step(self._around.close)
        if update.scope.is_last_call or not result.success:
            boundary.step(refit.sender_memory.release)
        boundary.step(
            observe_refit, manager, refit, call=self._origin.value, success=result.success
        )
        fail_behind(boundary, refit, update.refit, result)
        return result

    def _prepare(self) -> None:
        """All that may refuse the request or raise before SGLang, whose ranks wait for each other."""
        manager, request, refit, origin = self._manager, self._request, self._refit, self._origin
        version = getattr(request, "weight_version", None)
        scope = UpdateScope(
            origin,
            in_session=getattr(manager, "_session", None) is not None,
            # A client without sessions marks its last bucket by asking for the cache flush.
            is_last_call=getattr(request, "flush_cache", True),
            note=readable_note(request),
            version=None if version is None else as_text(version),
        )
        self._update = self._around.enter_context(refit.during(scope))
        self._around.enter_context(collector_paused())
        self._update.touches_target = getattr(request, "selector", "all") != "draft"
        check_request(manager, request)
        for extension in refit.extensions:
            extension.note_update()
        refit.wait_for_device()
        # From disk and from checkpoint-engine, SGLang processes weights after it loaded them.
        processes = origin in _PROCESS_AFTER_LOADING
        for context in (
            default_dtype_kept(),
            custom_loader_watched(refit, request),
            flush_watched(manager, self._update),
            checked_shared_memory(),
            refit.derived.in_place() if processes else nullcontext(),
        ):
            self._around_host.enter_context(context)

    def _asked(self) -> Any:
        """What SGLang answers; None where a failed answer is to be given, as `errors` of the boundary."""
        boundary, update, origin = self._boundary, self._update, self._origin
        ask = functools.partial(
            boundary.asked,
            self._original,
            self._request,
            around=self._around_host,
            has_barrier=origin in _END_WITH_BARRIER,
        )
        try:
            try:
                if not self._wants_session:
                    return ask()
                return in_a_session(ask, self._manager, self._request, update)
            finally:  # what was stored before an update failed is served too
                _renew_derived(self._refit, origin)
        except Exception as error:
            # Not a `step`: it may be SGLang's way (before sessions) to say that it could not flush.
            logger.exception("fp8rl: update_weights_from_%s failed", origin.value)
            is_ours = isinstance(error, Fp8RlError)
            if update.cache_flushed is False and not (is_ours or boundary.is_through):
                return failed_update(origin, str(_FLUSH_REFUSED))
            boundary.errors.append(str(error if is_ours else _foreign(origin, error)))
            return None


def _renew_derived(refit: ModelRefit, origin: Origin) -> None:
    """Raises an error of ours, which is never taken for a flush that SGLang refused before it."""
    try:
        refit.derived.end_of_update()
    except Fp8RlError:
        raise
    except Exception as error:
        raise _foreign(origin, error) from error


def _foreign(origin: Origin, error: Exception) -> RefitError:
    """What SGLang raised by itself, in words that say what to do."""
    return RefitError(
        f"update_weights_from_{origin.value}",
        f"{type(error).__name__}: {error}",
        "what is sent is read as SGLang's serializer writes it, a checkpoint as safetensors does",
        "Send with RefitClient or SGLang's MultiprocessingSerializer; nothing of this call is known to "
        "be stored.",
    )


def failed_update(origin: Origin, message: str) -> Any:
    """An answer in place of SGLang's."""
    from sglang.srt.managers import io_struct

    output_class = getattr(io_struct, _OUTPUTS[origin])
    extra = {"num_paused_requests": 0} if origin is Origin.DISK else {}
    return output_class(success=False, message=message, **extra)


def in_a_session(ask: Callable[[], Any], manager: Any, request: Any, update: Update) -> Any:
    """What `ask` answers in a session that is open for the length of this call of an update.

    Raises:
        RefitError: it could not be opened, on every rank alike.
    """
    from sglang.srt.managers import io_struct

    selector = getattr(request, "selector", "all")
    begun = manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector=selector))
    if not begun.success:
        raise RefitError(
            "the update's session", begun.message, "an update needs one", "Send the update again."
        )
    try:
        result = ask()
    finally:
        ended = manager.end_weight_update(io_struct.EndWeightUpdateReqInput())
    if not ended.success:
        manager._session = None  # nobody else would end it
        update.error = ended.message
        result.success, result.message = False, ended.message
    return result


def begin_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """`begin_weight_update`: what comes until its end is one refit, with the note that it brings."""
    from sglang.srt.managers import io_struct

    refit = refit_of(manager.tp_worker.model_runner.model)
    if refit is None or manager._session is not None:
        return original(request)
    boundary = Boundary(manager.tp_cpu_group)
    boundary.step(_announced, manager, request, refit)
    errors = boundary.failures()
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
    if refit.is_updating:  # a session that is opened for one call
        return
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
    is_inner = boundary.step(_prepared_end, manager, refit, around)
    errors = boundary.failures()
    if errors:  # refused: the session stays open
        boundary.step(around.close)
        return io_struct.EndWeightUpdateReqOutput(success=False, message=" | ".join(errors))
    result = boundary.step(boundary.asked, original, request, around=around, has_barrier=True)
    manager._session = None
    if result is None:
        text = " | ".join(boundary.errors)
        result = io_struct.EndWeightUpdateReqOutput(success=False, message=text)
    if is_inner:
        return result  # a session that was opened for one call ends within it
    boundary.step(refit.sender_memory.release)
    ended = end_session_of(boundary, refit, result)
    refit.report.log.session = None  # it is over, whatever was raised there
    for extension in refit.extensions:
        boundary.step(extension.end_session, manager)
    boundary.step(observe_refit, manager, refit)
    fail_behind(boundary, refit, ended, result)
    return result


def _prepared_end(manager: Any, refit: ModelRefit, around: ExitStack) -> bool:
    """Returns whether it is a session that was opened for one call."""
    check_weights_are_there(manager, "the end of a session processes them")
    around.enter_context(refit.derived.in_place())
    return refit.is_updating
