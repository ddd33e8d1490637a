"""Every hook this plugin puts into SGLang, each with its reason and when it can go; and the method they are for.

They are registered with SGLang's own `HookRegistry` (`declared_hooks.py`) and do nothing for models
that are served with another quantization method.
"""

from __future__ import annotations

from ...config import QUANTIZATION_METHOD
from ...declared_hooks import Hook, register_hooks
from ..modules.config import Fp8BlockwiseOnlineConfig
from ..modules.linear import Fp8BlockwiseOnlineLinearMethod
from .attach import build_model, start_model
from .status import add_routes, add_status
from .update_request import flattened_bucket
from .updater import RefitUpdater, after_flush

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
    register_hooks(HOOKS)
    if QUANTIZATION_METHOD in QUANTIZATION_METHODS:
        return
    add_quantization_method_choices([QUANTIZATION_METHOD])
    # By name: SGLang compares `quant_method.__class__.__name__`.
    linear.WEIGHT_LOADER_V2_SUPPORTED.append(Fp8BlockwiseOnlineLinearMethod.__name__)
    QUANTIZATION_METHODS[QUANTIZATION_METHOD] = Fp8BlockwiseOnlineConfig
