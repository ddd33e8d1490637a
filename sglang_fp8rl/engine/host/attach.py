"""Put the refit onto a model that SGLang has just built, and find it again."""

from __future__ import annotations

import functools
from typing import Any

from ..model.checkpoint_names import meta_tensors
from ..modules.config import Fp8BlockwiseOnlineConfig
from ..refit import ModelRefit

_ATTRIBUTE = "fp8rl_refit"


def refit_of(model: Any) -> ModelRefit | None:
    """The bookkeeping of a model served with `fp8_blockwise_online`, else None."""
    return getattr(model, _ATTRIBUTE, None)


def attach_to_model(model: Any, model_config: Any, *_: Any, **__: Any) -> None:
    """After SGLang built a model: wrap its loaders, before anything is loaded."""
    for module in model.modules():
        config = getattr(getattr(module, "quant_method", None), "quant_config", None)
        if isinstance(config, Fp8BlockwiseOnlineConfig):
            setattr(model, _ATTRIBUTE, attached(model, model_config, config))
            return


def attached(model: Any, model_config: Any, config: Fp8BlockwiseOnlineConfig) -> ModelRefit:
    """The refit of a model whose loaders it wraps from now on."""
    config.settle(model)
    probe_names = functools.partial(meta_tensors, model_config.model_path, model_config.hf_config)
    refit = ModelRefit(model, config.options, config.schemes, probe_names)
    refit.attach()
    return refit
