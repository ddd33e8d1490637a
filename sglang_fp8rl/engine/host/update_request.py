"""One update request: answered whatever happens, on every rank alike."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from sglang.srt.managers import io_struct

from ...errors import Fp8RlError, HostError, RefitError, as_text
from ...wire import stages
from ...wire.refit_note import apart_from_versions, note_of
from ..arrival.update import Origin, Update
from ..refit import ModelRefit, refit_of
from .boundary import Boundary
from .payload import check_load_format, not_read
from .request_end import request_end

logger = logging.getLogger(__name__)

# An answer in place of SGLang's.
_OUTPUTS: dict[Origin, Any] = {
    Origin.TENSOR: io_struct.UpdateWeightsFromTensorReqOutput,
    Origin.DISTRIBUTED: io_struct.UpdateWeightsFromDistributedReqOutput,
    Origin.DISK: io_struct.UpdateWeightFromDiskReqOutput,
    Origin.IPC: io_struct.UpdateWeightsFromIPCReqOutput,
}
_NEED_SESSIONS = (Origin.TENSOR, Origin.DISTRIBUTED)
_END_WITH_BARRIER = (Origin.TENSOR, Origin.IPC)
_PROCESS_AFTER_LOADING = (Origin.DISK, Origin.IPC)
_FLUSH_REFUSED = RefitError(
    "the cache",
    "not flushed, for requests are running or queued",
    "the weights of this update are stored, what the old ones had computed is still used",
    "Retract or finish the requests, then call /flush_cache.",
)


def answer_update(origin: Origin, host: Any, manager: Any, request: Any) -> Any:
    """Answer one update; `host` has SGLang's own methods of `manager`.

    A client that opened no session gets one for the length of its call, where SGLang asks for one.
    """
    refit = refit_of(manager.tp_worker.model_runner.model)
    if refit is None:
        return getattr(host, f"update_weights_from_{origin.value}")(request)
    update = Update(origin, marks=[(stages.ANSWERING, perf_counter())])
    with refit.during(update), collector_paused():
        result = _UpdateRequest(update, host, manager, request, refit).answer()
    if not result.success:
        # An error holds the frames that it passed, and they the bucket, in circles that Python or the model's
        # threads make of them: gigabytes. All of it is looked at, for what SGLang collects meanwhile is old.
        gc.collect()
    return result


class _UpdateRequest:
    """One request on one rank; `update` is what becomes of it."""

    def __init__(
        self, update: Update, host: Any, manager: Any, request: Any, refit: ModelRefit
    ) -> None:
        self._host, self._manager, self._request, self._refit = host, manager, request, refit
        self._update, self._boundary = update, Boundary(manager.tp_cpu_group)
        self._around = ExitStack()  # what SGLang answers

    def answer(self) -> Any:
        boundary, refit, manager = self._boundary, self._refit, self._manager
        boundary.step(self._prepare)
        is_asked = boundary.is_fine()
        update, result = self._update, None
        if is_asked:
            result = self._asked()
            # What was stored before an update failed is served too.
            boundary.step(refit.derived.end_of_update)
        boundary.step(self._around.close)  # where SGLang was not asked, or the session did not open
        if boundary.errors or result is None:
            texts = [] if result is None or result.success else [result.message]
            message = " | ".join([*texts, *boundary.errors])
            result = _OUTPUTS[update.origin](success=False, message=message)
        return request_end(refit)(boundary, manager, refit, update, result, is_asked).answer()

    def _prepare(self) -> None:
        """All that may refuse the request or raise before SGLang, whose ranks wait for each other."""
        manager, request, refit, update = self._manager, self._request, self._refit, self._update
        rid, versions = apart_from_versions(getattr(request, "rid", None))
        version = getattr(request, "weight_version", None) or next(iter(versions), None)
        update.version = None if version is None else as_text(version)
        update.in_session = getattr(manager, "_session", None) is not None
        # A client without sessions marks its last bucket by asking for the cache flush.
        update.is_last_call = getattr(request, "flush_cache", True)
        update.touches_target = getattr(request, "selector", "all") != "draft"
        update.note = note_of(rid)
        check_request(manager, request)
        refit.wait_for_device()
        around, dtype = self._around, torch.get_default_dtype()
        # A reload from disk that fails leaves the model's (0.5.16), and later forward passes compute with it.
        around.callback(lambda: torch.set_default_dtype(dtype))
        around.enter_context(_flush_watched(manager, update))
        if update.origin in _PROCESS_AFTER_LOADING:
            around.enter_context(refit.derived.in_place())

    def _asked(self) -> Any:
        """What SGLang answers; None where a failed answer is to be given, as `errors` of the boundary."""
        update, errors = self._update, self._boundary.errors
        has_no_session = getattr(self._manager, "_session", 0) is None
        try:
            if has_no_session and update.origin in _NEED_SESSIONS:
                return self._in_a_session()
            return self._ask()
        except Exception as error:
            # Not a `step`: it may be SGLang's way (before sessions) to say that it could not flush.
            subject = f"update_weights_from_{update.origin.value}"
            logger.exception("fp8rl: %s failed", subject)
            if isinstance(error, Fp8RlError):
                errors.append(str(error))
                return None
            if update.cache_flushed is False:
                return _OUTPUTS[update.origin](success=False, message=str(_FLUSH_REFUSED))
            errors.append(str(not_read(subject, error)))
            return None

    def _ask(self) -> Any:
        origin = self._update.origin
        self._update.marks.append((stages.OPENING_HANDLES, perf_counter()))
        return self._boundary.asked(
            getattr(self._host, f"update_weights_from_{origin.value}"),
            self._request,
            around=self._around,
            has_barrier=origin in _END_WITH_BARRIER,
        )

    def _in_a_session(self) -> Any:
        """The answer in a session that is open for the length of this call. Raises `RefitError` on every rank alike
        where it could not be opened."""
        boundary, host, manager = self._boundary, self._host, self._manager
        selector = getattr(self._request, "selector", "all")
        opens = io_struct.BeginWeightUpdateReqInput(selector=selector)
        boundary.step(boundary.asked, host.begin_weight_update, opens)
        errors = boundary.failures()
        if errors:
            manager._session = None  # nobody else would end it
            boundary.errors.clear()
            rule = "an update needs one"
            raise RefitError("the update's session", " | ".join(errors), rule, "Send it again.")
        try:
            return self._ask()
        finally:
            around = ExitStack()
            boundary.step(around.enter_context, self._refit.derived.in_place())
            closes = io_struct.EndWeightUpdateReqInput()
            boundary.step(boundary.asked, host.end_weight_update, closes, around=around)
            manager._session = None


# -- what a request may not ask for, refused before a byte of it is read --------------------------


def check_request(manager: Any, request: Any) -> None:
    """Raises `RefitError` for a request that can't be served as it is meant."""
    check_weights_are_there(manager, "an update writes them")
    check_selector(manager, request)
    if hasattr(request, "names"):
        check_lengths(request)
    payloads: Any = getattr(request, "serialized_named_tensors", None)
    load_format = getattr(request, "load_format", None)
    if payloads is None and load_format != "flash_rl":  # which puts itself before load_weights
        return
    check_load_format(load_format)
    size = torch.distributed.get_world_size(manager.tp_cpu_group)
    if len(payloads) != size:
        raise RefitError(
            "serialized_named_tensors",
            f"{len(payloads)} payload(s)",
            f"there is one for each of the {size} tensor-parallel rank(s)",
            "Send as many as the server's tp_size; RefitClient asks for it.",
        )


def check_lengths(request: Any) -> None:
    """Raises `RefitError` for an announcement that SGLang would cut to its shortest list."""
    counts = [len(one) for one in (request.names, request.dtypes, request.shapes)]
    if len(set(counts)) > 1:
        raise RefitError(
            "names, dtypes and shapes",
            f"{counts} of them",
            "each tensor that is broadcast has one of each",
            "Send three lists of one length; nothing of this call was received.",
        )


def are_weights_released(manager: Any) -> bool:
    """Whether `release_memory_occupation` took their memory: touching it ends the process."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    return GPU_MEMORY_TYPE_WEIGHTS in manager.offload_tags


def check_weights_are_there(manager: Any, rule: str) -> None:
    """Raises `HostError` while the memory of the weights is released."""
    if are_weights_released(manager):
        raise HostError(
            "the weights",
            "their memory is released",
            rule,
            "Call resume_memory_occupation first, then send all weights.",
        )


def check_selector(manager: Any, request: Any) -> None:
    """Raises `RefitError` where nothing would be updated, which SGLang answers with success."""
    if getattr(request, "selector", "all") == "draft" and manager.draft_worker is None:
        raise RefitError(
            "selector",
            "'draft'",
            "this server has no draft model: nothing would be updated",
            "Leave selector out, or start the server with a draft model.",
        )


# -- what is otherwise while a request is served ---------------------------------------------------


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


@contextmanager
def _flush_watched(manager: Any, update: Update) -> Iterator[None]:
    """Whether SGLang's flush was refused: weights that are stored are no failed refit for that.

    It says so by `success: false` (0.5.16: by an error), as of weights that are not stored.
    """
    flush = manager.flush_cache

    def flush_cache(*args: Any, **kwargs: Any) -> bool:
        update.marks.append((stages.FLUSHING, perf_counter()))
        update.cache_flushed = bool(flush(*args, **kwargs))
        update.marks.append((stages.ANSWERING, perf_counter()))
        return update.cache_flushed

    manager.flush_cache = flush_cache
    try:
        yield
    finally:
        manager.flush_cache = flush
