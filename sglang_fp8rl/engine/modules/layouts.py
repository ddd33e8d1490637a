"""What the server's parallel layout and options mean for updates: some are refused, one keeps experts unrecorded."""

from __future__ import annotations

import os
from typing import Any

import torch

from ...errors import ConfigError, HostError
from ...scheme import Granularity


def experts_may_move() -> bool:
    """Whether SGLang balances experts over ranks while serving."""
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    return bool(args.enable_eplb or args.elastic_ep_backend)


def check_layout() -> None:
    """Refuse pipeline parallelism, for this process's server.

    Only the first stage answers requests, and ranks compare what they found within one stage: what
    failed in another stage would be reported as served.

    Raises:
        ConfigError: the server has more than one stage.
    """
    from sglang.srt.runtime_context import get_parallel

    stages = get_parallel().pp_size
    if stages > 1:
        raise ConfigError(
            "--pp-size",
            str(stages),
            "an update that fails in a stage behind the first would be answered as a success: no other "
            "stage answers requests",
            "Start with --pp-size 1 and a larger --tp-size.",
        )


_FUSED_SWIGLU = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"


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
    """Refuse the option with which SGLang keeps copies of weights that no update path renews.

    `--dcp-replicate-q-proj` (models of DeepSeek's family take it by default under DCP): `q_b_proj` and
    `w_kc` of all ranks are gathered once, before graphs are captured, and decoding would go on with the
    first policy's queries. (DSpark keeps an FP8 copy of `lm_head` on ROCm, where SGLang takes no method
    of a plugin.)

    Raises:
        ConfigError: the option is on, and the model has such copies.
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


def check_no_experts_turned(model: torch.nn.Module) -> None:
    """Refuse what has SGLang rearrange experts once, behind their first load.

    MegaMoE interleaves gate and up rows of codes and scales, in a buffer of its own or in the parameter;
    `SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED` does so to experts left in BF16. An update writes them in the
    checkpoint's order.

    Raises:
        ConfigError: such an option is on, and the model has experts.
    """
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.runtime_context import get_server_args

    name = next((name for name, one in model.named_modules() if isinstance(one, FusedMoE)), None)
    if name is None:
        return
    args = get_server_args()
    options = {
        "--moe-a2a-backend": str(args.moe_a2a_backend),
        "--moe-runner-backend": str(args.moe_runner_backend),
    }
    turned = [f"{option} {value}" for option, value in options.items() if "megamoe" in value]
    # As SGLang reads a switch of the environment.
    is_set = os.environ.get(_FUSED_SWIGLU, "").lower() in ("true", "1", "yes", "y")
    turned += [_FUSED_SWIGLU] if is_set else []
    if turned:
        raise ConfigError(
            name,
            turned[0],
            "gate and up rows of experts are interleaved once, behind the first load; an update would "
            "write them in the checkpoint's order",
            "Leave it out.",
        )
