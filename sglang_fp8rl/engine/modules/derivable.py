"""MLA: what SGLang makes of its weights at the start has to be right after every update too."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ConfigError, HostError
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


def check_no_copies_of_the_start(model: torch.nn.Module) -> None:
    """Refuse `--dcp-replicate-q-proj`, which models of DeepSeek's family take by default under DCP.

    SGLang gathers `q_b_proj` and `w_kc` of all ranks once, before it captures graphs, and no update
    path of it (nor ours) gathers them again: decoding would go on with the first policy's queries.

    Raises:
        ConfigError: the flag is on and the model has such copies.
    """
    from sglang.srt.runtime_context import get_parallel

    if not getattr(get_parallel(), "dcp_replicate_q_proj", False):
        return
    for name, module in model.named_modules():
        if "w_kc_qrep" in vars(module):
            raise ConfigError(
                f"{name}.w_kc_qrep",
                "--dcp-replicate-q-proj",
                "these copies of q_b_proj and w_kc are made once, at the start; after an update, decoding "
                "would use the old ones",
                "Start with --no-dcp-replicate-q-proj.",
            )
