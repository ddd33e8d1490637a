"""Put the refit onto a model that SGLang has just built, and find it again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...checkpoint import meta_tensors
from ..modules.config import Fp8BlockwiseOnlineConfig
from ..refit import ModelRefit
from .model_choice import quantization_of

_ATTRIBUTE = "fp8rl_refit"


def refit_of(model: Any) -> ModelRefit | None:
    """The bookkeeping of a model served with `fp8_blockwise_online`, else None."""
    return getattr(model, _ATTRIBUTE, None)


def build_model(
    original: Callable[..., Any], model_config: Any, load_config: Any, quant_config: Any = None
) -> Any:
    """`_initialize_model`: SGLang builds a model; its loaders are wrapped, before anything is loaded."""
    quant_config = quantization_of(model_config, quant_config)
    model = original(model_config, load_config, quant_config)
    for module in model.modules():
        config = getattr(getattr(module, "quant_method", None), "quant_config", None)
        if isinstance(config, Fp8BlockwiseOnlineConfig):
            setattr(model, _ATTRIBUTE, attached(model, model_config, config))
            break
    return model


def attached(model: Any, model_config: Any, config: Fp8BlockwiseOnlineConfig) -> ModelRefit:
    """The refit of a model whose loaders it wraps from now on."""
    config.settle(model)
    probe_names = functools.partial(meta_tensors, model_config.model_path, model_config.hf_config)
    refit = ModelRefit(model, config.options, config.schemes, probe_names)
    refit.attach()
    return refit
