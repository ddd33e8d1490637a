"""How a model of this method is built and started."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from ...checkpoint import meta_tensors
from ...config import QUANTIZATION_METHOD
from ...errors import ConfigError
from ..modules.config import Fp8BlockwiseOnlineConfig
from ..refit import ModelRefit, refit_of

logger = logging.getLogger(__name__)


def build_model(
    original: Callable[..., Any], model_config: Any, load_config: Any, quant_config: Any = None
) -> Any:
    """`_initialize_model`: SGLang builds a model; its loaders are wrapped, before anything is loaded.

    A draft model (an embedded MTP layer too), to which SGLang hands its target's quantization, is built
    without.

    Raises:
        ConfigError: `--speculative-draft-model-quantization` asks for this method; SGLang before 0.5.23
            does not tell whether it did.
    """
    if not isinstance(quant_config, Fp8BlockwiseOnlineConfig):
        return original(model_config, load_config, quant_config)
    is_draft = getattr(model_config, "is_draft_model", False)
    if is_draft and _draft_was_asked_for():
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
        logger.info("fp8rl: the draft model stays in high precision")
    else:
        attached(model, model_config, quant_config)
    return model


def attached(model: Any, model_config: Any, config: Fp8BlockwiseOnlineConfig) -> ModelRefit:
    """The refit of a model whose loaders it wraps from now on."""
    config.settle(model)
    probe_names = functools.partial(meta_tensors, model_config.model_path, model_config.hf_config)
    refit = ModelRefit(model, config.options, config.schemes, probe_names)
    refit.attach()
    return refit


def _draft_was_asked_for() -> bool:
    from sglang.srt.runtime_context import get_server_args

    return bool(getattr(get_server_args(), "_speculative_draft_quantization_explicitly_set", False))


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
