"""Vision towers stay in high precision: told by the types of their modules, not by names.

Some of SGLang's multimodal models give their vision tower the language model's quantization, some do
not. Neither checkpoints nor trainers quantize it. A linear layer belongs to the language model if it
is in a decoder layer: an element of a list of which one element at least attends to the KV cache
(`RadixAttention`). A tower attends within one image (`VisionAttention`), and its projector to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...scheme import Cause, Granularity, Scheme
from .linear import Fp8BlockwiseOnlineLinearMethod

REASON = "not in a decoder layer of a multimodal model: a vision tower or its projector"


def leave_vision_towers(model: torch.nn.Module) -> None:
    """Serve every linear layer outside the decoder layers of a multimodal model unquantized.

    Call it when the model is built and nothing is loaded yet. Models without `VisionAttention` are
    left alone.

    Side effects on the host: such a layer gets SGLang's `UnquantizedLinearMethod` and a weight of it.
    """
    from sglang.srt.layers.attention.vision import VisionAttention

    if not any(isinstance(module, VisionAttention) for module in model.modules()):
        return
    decoders = {id(module) for layer in _decoder_layers(model) for module in layer.modules()}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, Fp8BlockwiseOnlineLinearMethod) and id(module) not in decoders:
            _serve_unquantized(module, method)


def _decoder_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    from sglang.srt.layers.radix_attention import RadixAttention

    for layers in model.modules():
        if isinstance(layers, torch.nn.ModuleList) and any(
            isinstance(module, RadixAttention) for module in layers.modules()
        ):
            yield from layers


def _serve_unquantized(layer: Any, method: Fp8BlockwiseOnlineLinearMethod) -> None:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    for leaf in ("weight", "weight_scale_inv", "weight_scale", "input_scale"):
        layer._parameters.pop(leaf, None)
    layer.quant_method = UnquantizedLinearMethod()
    # SGLang's newer loader is for the parameter classes of quantized layers.
    arguments = {**method.created_with, "weight_loader": layer.weight_loader}
    layer.quant_method.create_weights(layer, **arguments)
    scheme = Scheme(Granularity.HIGH_PRECISION, Cause.VISION_TOWER, REASON)
    method.decisions.leave_in_high_precision(method.prefix, scheme)
