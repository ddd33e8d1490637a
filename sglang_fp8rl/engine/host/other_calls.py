"""What is asked of a model beside updates: its start, flushes of the cache, reads and releases of weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ...errors import ConfigError, RefitError
from ..refit import refit_of
from .boundary import Boundary
from .refit_end import fail_behind
from .request_checks import check_weights_are_there


def start_model(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
    """`ModelRunner.configure_kv_cache_dtype`: weights are loaded, nothing has run yet.

    Raises:
        ConfigError: as `check_control`, or as an extension says.
    """
    from sglang.srt.runtime_context import get_server_args

    refit = refit_of(runner.model)
    if refit is not None:
        check_control(get_server_args())
        refit.note_loaded()
        refit.extensions[:] = [one for one in refit.extensions if one.start(runner)]
    return result


def check_control(args: Any) -> None:
    """Raises `ConfigError` where a request does not reach all ranks between the same two forward passes.

    Then one rank waits for the others in a request's end or fingerprint, and these for it in a forward pass.
    """
    if args.enable_dp_attention_local_control_broadcast:
        raise ConfigError(
            "--enable-dp-attention-local-control-broadcast",
            "set",
            "the ranks answer an update and a fingerprint together, so all of them get the request at once",
            "Leave it out.",
        )


def after_flush(is_empty: bool, scheduler: Any, *_: Any, **__: Any) -> bool:
    """`Scheduler.flush_cache`: what it did, on every rank alike."""
    refit = refit_of(scheduler.tp_worker.model_runner.model)
    if not is_empty or refit is None or refit.is_updating:
        return is_empty
    refit.report.flushed()  # behind a session's end there is no refit that this could divide
    manager = scheduler.weight_updater
    for extension in refit.extensions:
        is_empty = extension.cache_is_empty(manager) and is_empty
    return is_empty


def note_released_weights(manager: Any, request: Any) -> None:
    """Behind `release_memory_occupation`: weights that nobody kept have to be sent again, all of them."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.runtime_context import get_server_args

    refit = refit_of(manager.tp_worker.model_runner.model)
    are_released = not request.tags or GPU_MEMORY_TYPE_WEIGHTS in request.tags
    is_paged = manager.memory_saver_adapter.enabled
    is_kept = get_server_args().enable_weights_cpu_backup
    if refit is not None and are_released and is_paged and not is_kept:
        boundary = Boundary(manager.tp_cpu_group)
        boundary.step(refit.weights_lost)
        # SGLang's answer to this request has no room for an error.
        fail_behind(boundary, refit, None)


def read_unfolded(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Requests that read the served weights get them as they were sent."""
    refit = refit_of(manager.tp_worker.model_runner.model)
    if refit is None:
        return original(request)
    boundary, around = Boundary(manager.tp_cpu_group), ExitStack()
    boundary.step(check_weights_are_there, manager, "this request reads them")
    errors, result = boundary.failures(), None
    if not errors:
        boundary.step(around.enter_context, refit.unfolded())
        if boundary.is_fine():
            result = boundary.step(original, request)
        boundary.step(around.close)
        if getattr(request, "action", "") == "reset_tensors":
            boundary.step(refit.weights_lost)
        errors = fail_behind(boundary, refit, None)
    return _not_read(request, errors) if errors else result


def _not_read(request: Any, errors: list[str]) -> Any:
    """The failed answer.

    Raises:
        RefitError: to a request by RPC, for which SGLang answers it.
    """
    from sglang.srt.managers import io_struct

    if isinstance(request, io_struct.CheckWeightsReqInput):
        return io_struct.CheckWeightsReqOutput(success=False, message=" | ".join(errors))
    if isinstance(request, io_struct.GetWeightsByNameReqInput):
        return io_struct.GetWeightsByNameReqOutput(parameter=None)
    raise RefitError(
        "the weights", " | ".join(errors), "they were not read", "The server's log says more."
    )
