"""What a block-FP8 checkpoint on the hub quantizes, and how its config says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# `quantization_config` of a block-FP8 checkpoint that SGLang's own `fp8` method serves.
BLOCK_FP8_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def quantized_names(state_dict: dict[str, torch.Tensor]) -> list[str]:
    """The weights a block-FP8 checkpoint on the hub quantizes: projections, not the router."""
    return [
        name
        for name, weight in state_dict.items()
        if weight.dim() == 2
        and name.endswith("weight")
        and "visual." not in name
        and name.rsplit(".", 2)[-2] not in ("embed_tokens", "lm_head", "gate", "shared_expert_gate")
    ]


def quantized(
    state_dict: dict[str, torch.Tensor],
    cast: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """The state dict of a block-FP8 checkpoint; `cast(weight)` gives e4m3 and `weight_scale_inv`."""
    result = dict(state_dict)
    for name in quantized_names(state_dict):
        result[name], result[f"{name}_scale_inv"] = cast(state_dict[name])
    return result
