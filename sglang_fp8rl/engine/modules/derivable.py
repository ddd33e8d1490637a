"""MLA: what SGLang makes of its weights at the start has to be right after every update too."""

from __future__ import annotations

import os
from typing import Any

import torch

from ...errors import ConfigError, HostError
from ...scheme import Granularity

_DSPARK_HEAD = "SGLANG_ROCM_OPT_DSPARK_FP8_LM_HEAD"


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
    """Refuse the options with which SGLang keeps copies of weights that no update path renews.

    `--dcp-replicate-q-proj` (models of DeepSeek's family take it by default under DCP): `q_b_proj` and
    `w_kc` of all ranks are gathered once, before graphs are captured, and decoding would go on with the
    first policy's queries. `SGLANG_ROCM_OPT_DSPARK_FP8_LM_HEAD`: DSpark quantizes `lm_head` at its first
    verification and keeps the result, so drafts would be judged by the first policy's head.

    Raises:
        ConfigError: such an option is on, and the model has such copies or will make them.
    """
    from sglang.srt.runtime_context import get_parallel

    if os.environ.get(_DSPARK_HEAD, "").lower() in ("true", "1", "yes", "y"):
        raise ConfigError(
            _DSPARK_HEAD,
            repr(os.environ[_DSPARK_HEAD]),
            "DSpark's FP8 copy of lm_head is made once; after an update, it would verify drafts with the "
            "old one",
            "Unset it.",
        )

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
