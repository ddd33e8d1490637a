"""Every hook this plugin puts into SGLang, each with its reason and when it can go.

They are registered with SGLang's own `HookRegistry` and do nothing for models that are served with
another quantization method.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RefitError
from ..flat_layout import from_text
from .buckets import FlatBucket
from .checkpoint_names import meta_tensors
from .http_plan import add_plan_route, plan_state
from .model_choice import choose_as_for_fp8, leave_draft_model
from .pickled_buckets import PickledBuckets
from .quant_config import Fp8BlockwiseOnlineConfig
from .refit import ModelRefit
from .status import status_section

logger = logging.getLogger(__name__)

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_ATTRIBUTE = "fp8rl_refit"
_PICKLED = PickledBuckets()


@dataclass(frozen=True)
class Hook:
    """One hook: where, what kind, by which function, why, and when it can go."""

    target: str
    kind: str
    function: Callable[..., Any]
    reason: str
    until: str


def refit_of(model: Any) -> ModelRefit | None:
    """The bookkeeping of a model served with `fp8_blockwise_online`, else None."""
    return getattr(model, _ATTRIBUTE, None)


# -- the model ---------------------------------------------------------------------------------


def attach_to_model(model: Any, model_config: Any, *_: Any, **__: Any) -> None:
    """After SGLang built a model: wrap its loaders, before anything is loaded."""
    for module in model.modules():
        config = getattr(getattr(module, "quant_method", None), "quant_config", None)
        if isinstance(config, Fp8BlockwiseOnlineConfig):
            config.settle(model)
            refit = ModelRefit(model, config.options, config.schemes)
            refit.attach()
            refit.probe_names = functools.partial(
                meta_tensors, model_config.model_path, model_config.hf_config
            )
            setattr(model, _ATTRIBUTE, refit)
            _PICKLED.in_use = True
            return


# -- update calls ------------------------------------------------------------------------------


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


def _update_hook(kind: str, output_name: str, *, sessions: bool) -> Callable[..., Any]:
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


def unpickle(original: Callable[..., Any], data: Any) -> Any:
    """A bucket of a layout seen before is not taken apart again."""
    return _PICKLED.deserialize(original, data) if _PICKLED.in_use else original(data)


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


# -- status ------------------------------------------------------------------------------------


def add_status(result: Any, scheduler: Any, recv_req: Any = None) -> Any:
    """`GET /server_info`: one more section; or the plan, to a request for it."""
    refit = refit_of(scheduler.tp_worker.model_runner.model)
    if refit is None:
        return result
    plan = plan_state(refit, recv_req)
    if plan is not None:
        result.internal_state = plan
        return result
    session = getattr(scheduler.weight_updater, "_session", None)
    result.internal_state["fp8rl"] = status_section(refit, session_open=session is not None)
    return result


HOOKS = (
    Hook(
        "sglang.srt.model_loader.utils.get_model_architecture",
        "AROUND",
        choose_as_for_fp8,
        "Mixtral with fused experts is for quantization methods of a list; this one is served like `fp8`",
        "SGLang asks the method, or has one Mixtral",
    ),
    Hook(
        "sglang.srt.model_loader.loader._initialize_model",
        "BEFORE",
        leave_draft_model,
        "a draft model inherits its target's quantization; it stays in high precision unless asked for",
        "SGLang leaves drafts alone by default",
    ),
    Hook(
        "sglang.srt.model_loader.loader._initialize_model",
        "AFTER",
        attach_to_model,
        "the one place every loader builds a model in: loaders are wrapped before they run",
        "SGLang gives quantization methods the model they were built into",
    ),
    Hook(
        f"{_MANAGER}.update_weights_from_tensor",
        "AROUND",
        _update_hook("tensor", "UpdateWeightsFromTensorReqOutput", sessions=True),
        "clients without sessions; a payload that can't be read must not end the scheduler; one "
        "rank's failure must reach the client",
        "SGLang answers failed updates and gathers outcomes over ranks",
    ),
    Hook(
        f"{_MANAGER}.update_weights_from_distributed",
        "AROUND",
        _update_hook("distributed", "UpdateWeightsFromDistributedReqOutput", sessions=True),
        "as above",
        "as above",
    ),
    Hook(
        f"{_MANAGER}.update_weights_from_disk",
        "AROUND",
        _update_hook("disk", "UpdateWeightFromDiskReqOutput", sessions=False),
        "a failed update from disk is rolled back by loading again, and that may raise too",
        "SGLang answers failed updates",
    ),
    Hook(
        f"{_MANAGER}.update_weights_from_ipc",
        "AROUND",
        _update_hook("ipc", "UpdateWeightsFromIPCReqOutput", sessions=False),
        "as for tensors",
        "as for tensors",
    ),
    Hook(
        f"{_MANAGER}.end_weight_update",
        "AROUND",
        end_session,
        "a session that ends with half of an FP8 pair has to fail",
        "SGLang knows pairs of weight and scale",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
        "._update_weights_from_flattened_bucket",
        "AROUND",
        flattened_bucket,
        "a bucket that is replayed needs none of its tensors as objects",
        "SGLang hands load_weights the bucket itself",
    ),
    Hook(
        "sglang.srt.utils.common.MultiprocessingSerializer.deserialize",
        "AROUND",
        unpickle,
        "of 18,000 names, unpickling takes longer than casting all weights, for the same names each time",
        "SGLang sends layouts that need not be read again",
    ),
    Hook(
        f"{_MANAGER}.release_memory_occupation",
        "AFTER",
        note_released_weights,
        "memory that was released and resumed holds anything until a full update; the status says so",
        "SGLang tells the model that its weights are gone",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "AFTER",
        add_status,
        "the status section of /server_info; the plan, to a request that asks for it",
        "SGLang lets plugins add to internal_states",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__",
        "AFTER",
        add_plan_route,
        "made in every process that serves HTTP, when SGLang's app is there and not yet serving: "
        "it gets the route GET /fp8rl/plan",
        "SGLang lets plugins add routes",
    ),
)


def register_hooks(*, has_sessions: bool) -> None:
    """Hand the hooks to SGLang's registry; `load_plugins()` applies them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in HOOKS:
        if hook.function is end_session and not has_sessions:
            continue
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
