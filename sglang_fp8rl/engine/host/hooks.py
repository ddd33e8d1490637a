"""Every hook this plugin puts into SGLang, each with its reason and when it can go; and what the method adds to a
model that SGLang builds and starts.

They are registered with SGLang's own `HookRegistry` (`declared_hooks.py`) and do nothing for models
that are served with another quantization method.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from ...checkpoint import meta_tensors
from ...config import QUANTIZATION_METHOD
from ...declared_hooks import Hook, register_hooks
from ...errors import ConfigError
from ...versions import HAS_SESSIONS, TELLS_WHAT_DRAFTS_ASKED_FOR
from ..model.draft import Draft
from ..modules.config import Fp8BlockwiseOnlineConfig
from ..modules.linear import Fp8BlockwiseOnlineLinearMethod
from ..refit import ModelRefit, refit_of
from .arguments import check_arguments
from .flush import RefitFlushWrapper
from .payload import check_load_format, flattened_bucket
from .status import add_routes, add_status
from .updater import RefitUpdater, after_flush
from .weight_version import with_whole_version

logger = logging.getLogger(__name__)


def build_model(
    original: Callable[..., Any], model_config: Any, load_config: Any, quant_config: Any = None
) -> Any:
    """`_initialize_model`: SGLang builds a model; its loaders are wrapped, before anything is loaded.

    A draft model (an embedded MTP layer too), to which SGLang hands its target's quantization, is built
    without.

    Raises:
        ConfigError: `--speculative-draft-model-quantization` asks for this method; SGLang before 0.5.18
            does not tell whether it did.
        RefitError: `--load-format flash_rl`.
    """
    if not isinstance(quant_config, Fp8BlockwiseOnlineConfig):
        return original(model_config, load_config, quant_config)
    if load_config.load_format == "flash_rl":
        check_load_format("flash_rl")
    is_draft = getattr(model_config, "is_draft_model", False)
    if is_draft and TELLS_WHAT_DRAFTS_ASKED_FOR and _draft_was_asked_for():
        raise ConfigError(
            "--speculative-draft-model-quantization",
            repr(QUANTIZATION_METHOD),
            "what an update brought is written down for the target alone, so nothing would say that "
            "a draft in FP8 was left old",
            "Leave it out: the draft is served in high precision, and updates reach it.",
        )
    model_config.quantization = "fp8"  # SGLang has Mixtral with fused experts for a list of methods
    try:
        model = original(model_config, load_config, None if is_draft else quant_config)
    finally:
        model_config.quantization = QUANTIZATION_METHOD
    if is_draft:
        Draft(model)
        logger.info("fp8rl: the draft model stays in high precision")
        return model
    quant_config.settle(model)
    names = functools.partial(meta_tensors, model_config.model_path, model_config.hf_config)
    ModelRefit(model, quant_config.options, quant_config.schemes, names).attach()
    return model


def _draft_was_asked_for() -> bool:
    from sglang.srt.runtime_context import get_server_args

    return bool(get_server_args()._speculative_draft_quantization_explicitly_set)


def start_model(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
    """`ModelRunner.configure_kv_cache_dtype`: weights are loaded, nothing has run yet. Raises `ConfigError` as
    `check_arguments`, or as an extension says."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.runtime_context import get_server_args

    refit = refit_of(runner.model)
    if refit is not None:
        check_arguments(resolved_view(get_server_args()))
        refit.note_loaded()
        refit.runner = runner
        refit.extensions[:] = [one for one in refit.extensions if one.start(runner)]
    return result


_SESSION_END = "sglang.srt.managers.tokenizer_manager.TokenizerManager.end_weight_update"
HOOKS = (
    Hook(
        "sglang.srt.model_loader.loader._initialize_model",
        "AROUND",
        build_model,
        "the one place every loader builds a model in: a draft model, which inherits its target's "
        "quantization, stays in high precision; loaders are wrapped before they run",
        "SGLang leaves drafts alone by default, and gives quantization methods the model they were built into",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
        "REPLACE",
        RefitUpdater,
        "an update is answered whatever its payload is, for all ranks alike; a session is a refit, whose end "
        "tells what did not come; released memory holds anything; who reads weights gets them unfolded",
        "SGLang answers failed updates, gathers outcomes over ranks, and lets plugins see sessions and memory",
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
        "sglang.srt.model_executor.model_runner.ModelRunner.configure_kv_cache_dtype",
        "AFTER",
        start_model,
        "between the load and the first forward pass: the cache's dtype is known, its scales are folded",
        "SGLang tells quantization methods the dtype of the KV cache",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.flush_cache",
        "AFTER",
        after_flush,
        "scales of the KV cache may move at the moment in which it is empty, and at no other",
        "SGLang tells the model that the cache is empty",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.flush_wrapper.SchedulerFlushWrapper",
        "REPLACE",
        RefitFlushWrapper,
        "a flush with a timeout is done or given up by each rank's own clock; ranks that part wait for ever",
        "SGLang decides it on one rank",
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
        add_routes,
        "made in every process that serves HTTP, when SGLang's app is there and not yet serving: "
        "it gets the routes GET /fp8rl/plan, /fp8rl/status and /fp8rl/fingerprint",
        "SGLang lets plugins add routes",
    ),
    *(
        Hook(
            target,
            "AROUND",
            with_whole_version,
            "the version moves when the refit is whole, that of a session at its end; SGLang takes that of any call that succeeds",
            "SGLang takes a version at the end of a session alone",
        )
        for target in (
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_tensor",
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_distributed",
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_ipc",
            _SESSION_END,
        )
    ),
)


def register_method() -> None:
    """Register the method, its loader kind and the hooks. Calling it twice changes nothing.

    Side effects on the host: adds to `QUANTIZATION_METHODS`, to the choices of `--quantization`,
    to `WEIGHT_LOADER_V2_SUPPORTED`, and to `HookRegistry`.
    """
    from sglang.srt.layers import linear
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.server_args import add_quantization_method_choices

    # First: SGLang logs what a plugin raises and goes on, and there is no method without its hooks.
    register_hooks([one for one in HOOKS if HAS_SESSIONS or one.target != _SESSION_END])
    if QUANTIZATION_METHOD in QUANTIZATION_METHODS:
        return
    add_quantization_method_choices([QUANTIZATION_METHOD])
    # By name: SGLang compares `quant_method.__class__.__name__`.
    linear.WEIGHT_LOADER_V2_SUPPORTED.append(Fp8BlockwiseOnlineLinearMethod.__name__)
    QUANTIZATION_METHODS[QUANTIZATION_METHOD] = Fp8BlockwiseOnlineConfig
