"""What stands around each update request of SGLang's scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ...errors import RefitError
from ...wire.layout_text import from_text
from ..arrival.bucket import FlatBucket
from ..refit import ModelRefit
from .attach import refit_of

logger = logging.getLogger(__name__)


def _run_update(
    original: Callable[..., Any],
    manager: Any,
    refit: ModelRefit,
    request: Any,
    kind: str,
    output_class: type,
) -> Any:
    """Run one update request so that it is answered, by every rank alike, whatever happens."""
    in_session = getattr(manager, "_session", None) is not None and not refit.implicit_session
    refit.kind = kind
    # A client without sessions marks its last bucket by asking for the cache flush.
    refit.keep_pairs = in_session or not getattr(request, "flush_cache", True)
    has_barrier = kind in ("tensor", "ipc")
    try:
        if getattr(request, "load_format", None) == "direct":
            raise RefitError(
                "load_format",
                "'direct'",
                "it copies into parameters and would leave FP8 scales behind",
                "Leave load_format out, or use 'flattened_bucket'.",
            )
        try:
            # Reloading from disk processes weights after it loaded them; all else only loads.
            with refit.derived.in_place() if kind == "disk" else nullcontext():
                result = original(manager, request)
        finally:  # what was stored before an update failed is served too
            refit.derived.end_of_update()
        success, message = result.success, result.message
    except Exception as error:
        # The boundary of a request: today this ends the scheduler and with it the server. It is
        # answered instead, and nothing goes on as if it had worked.
        logger.exception("fp8rl: update_weights_from_%s failed", kind)
        success, message = False, str(error) or type(error).__name__
        if has_barrier:
            torch.distributed.barrier(group=manager.tp_cpu_group)
        extra = {"num_paused_requests": 0} if kind == "disk" else {}
        result = output_class(success=False, message=message, **extra)
    others = _other_ranks(manager, refit, None if success else message)
    refit.report.other_ranks([text for _, unmended in others for text in unmended])
    failed = [text for text, _ in others if text is not None]
    if failed and success:
        result.success, result.message = False, " | ".join(failed)
    return result


def _other_ranks(
    manager: Any, refit: ModelRefit, message: str | None
) -> list[tuple[str | None, list[str]]]:
    """Of every other rank: why this call failed there (or None), and what is not mended.

    Only rank 0's answer reaches the client, and a NaN may be in a shard that rank 0 never sees.
    """
    group = manager.tp_cpu_group
    size, own = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    if size == 1:
        return []
    unmended = list(refit.report.failed.values())
    gathered: list[Any] = [None] * size
    torch.distributed.all_gather_object(gathered, (message, unmended), group=group)
    return [
        (text and f"tp_rank {rank}: {text}", [f"tp_rank {rank}: {line}" for line in lines])
        for rank, (text, lines) in enumerate(gathered)
        if rank != own
    ]


def update_hook(kind: str, output_name: str, *, sessions: bool) -> Callable[..., Any]:
    def hook(original: Callable[..., Any], manager: Any, request: Any) -> Any:
        from sglang.srt.managers import io_struct

        refit = refit_of(manager.tp_worker.model_runner.model)
        if refit is None:
            return original(manager, request)
        output_class = getattr(io_struct, output_name)
        if not sessions or getattr(manager, "_session", 0) is not None:
            return _run_update(original, manager, refit, request, kind, output_class)
        selector = getattr(request, "selector", "all")
        refit.implicit_session = True
        manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector=selector))
        try:
            return _run_update(original, manager, refit, request, kind, output_class)
        finally:
            manager.end_weight_update(io_struct.EndWeightUpdateReqInput())

    return hook


def end_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """`end_weight_update`: FP8 halves that never met fail the session."""
    refit = refit_of(manager.tp_worker.model_runner.model)
    with refit.derived.in_place() if refit is not None else nullcontext():
        result = original(manager, request)
    if refit is None or not result.success:
        return result
    if refit.implicit_session:
        refit.implicit_session = False
        return result
    missing = refit.close_pairs()
    if missing:
        refit.report.current.errors += missing.values()
        result.success, result.message = False, " | ".join(missing.values())
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
