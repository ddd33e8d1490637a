"""Where SGLang's server meets the scales of an FP8 KV cache: start, flush, reads of served weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..kv_scales.attention_layers import attention_layers, refused
from ..kv_scales.kv_scales import Source
from .attach import refit_of
from .calibration_tokens import calibration_of

# Server argument to why scales can't follow there; refused where it is set.
REFUSED = {
    "speculative_algorithm": "a draft model writes into a cache of its own, without scales",
    "enable_hierarchical_cache": "a cache on the host or in a store outlives a change of scales",
    "enable_lmcache": "a cache on the host or in a store outlives a change of scales",
    "enable_lora": "an adapter on q, k, v or o is added beside the weights that carry the scales",
    "lora_paths": "an adapter on q, k, v or o is added beside the weights that carry the scales",
}
REFUSED_CALIBRATED = {
    "enable_dp_attention": "ranks with requests of their own can't run one text together",
}


def start_kv_scales(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
    """`ModelRunner.configure_kv_cache_dtype`: weights are loaded, nothing has run yet.

    Raises:
        ConfigError: an FP8 cache whose scales can't follow the weights.
    """
    refit = refit_of(runner.model)
    is_e4m3 = runner.kv_cache_dtype is torch.float8_e4m3fn
    if refit is None or not is_e4m3 or refit.options.kv_scales == "unit":
        return result
    from sglang.srt.distributed.parallel_state import get_attn_tp_group
    from sglang.srt.runtime_context import get_server_args

    mode = refit.options.kv_scales
    check_arguments(get_server_args(), mode)
    if runner.dtype is not torch.bfloat16:
        raise refused("--dtype", str(runner.dtype), "powers of two commute with BF16's rounding")
    layers = attention_layers(runner.model)
    source: Source | None = None
    if mode == "sent":
        source = refit.sent_scales
    elif mode == "calibrated":
        source = refit.calibration = calibration_of(runner, refit.options)
    refit.sent_scales.is_active = True
    refit.kv.start(layers, get_attn_tp_group().cpu_group, source)
    return result


def check_arguments(args: Any, mode: str) -> None:
    """Raises `ConfigError` for a server whose cache the scales can't follow in that mode."""
    both = {**REFUSED, **REFUSED_CALIBRATED} if mode == "calibrated" else REFUSED
    for name, reason in both.items():
        value = getattr(args, name, None)
        if value:
            raise refused(f"--{name.replace('_', '-')}", str(value), reason)
    if args.disaggregation_mode != "null":
        reason = "bytes of the cache go to another server, which has scales of its own"
        raise refused("--disaggregation-mode", args.disaggregation_mode, reason)


def after_flush(is_empty: bool, scheduler: Any, *_: Any, **__: Any) -> bool:
    """`Scheduler.flush_cache`: what it did, on every rank alike."""
    refit = refit_of(scheduler.tp_worker.model_runner.model)
    if is_empty and refit is not None:
        refit.kv.cache_is_empty(during_update=refit.is_updating)
    return is_empty


def read_unfolded(original: Callable[..., Any], manager: Any, *args: Any, **kw: Any) -> Any:
    """Requests that read the served weights."""
    refit = refit_of(manager.tp_worker.model_runner.model)
    if refit is None:
        return original(manager, *args, **kw)
    with refit.kv.unfolded():
        return original(manager, *args, **kw)
