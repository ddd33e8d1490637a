"""Put the method into SGLang's registries, once per process."""

from __future__ import annotations

from ...config import QUANTIZATION_METHOD
from ...declared_hooks import register_hooks
from ..modules.config import Fp8BlockwiseOnlineConfig
from ..modules.linear import Fp8BlockwiseOnlineLinearMethod
from .hooks import HOOKS


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
