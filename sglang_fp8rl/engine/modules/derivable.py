"""MLA: what SGLang derives from `kv_b_proj` has to know how it is quantized."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import HostError
from ...scheme import Granularity


def check_derivable(model: torch.nn.Module) -> None:
    """Refuse a `kv_b_proj` whose scales this SGLang would misread.

    Raises:
        HostError: this SGLang would read row scales of `kv_b_proj` as block scales (before the version
            that asks the layer for its block size).
    """
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    if hasattr(deepseek_weight_loader, "_resolve_layer_weight_block_size"):
        return
    for name, module in model.named_modules():
        method: Any = getattr(getattr(module, "kv_b_proj", None), "quant_method", None)
        scheme = getattr(method, "fp8rl_scheme", None)
        if scheme is not None and scheme.granularity is Granularity.PER_CHANNEL:
            raise HostError(
                f"{name}.kv_b_proj",
                scheme.reason,
                "this SGLang derives w_kc and w_vc from blocks only",
                "Add kv_b_proj to ignored_layers, or use a newer SGLang (0.5.23 can).",
            )
