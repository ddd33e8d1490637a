"""Parts of SGLang whose loaders do more than a linear layer's: convolutions, states, sinks; each as a rank of two.

The parts are SGLang's own. What their models do with a name is written here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from types import SimpleNamespace

import torch
from torch import nn

from sglang_fp8rl.config import Options
from sglang_fp8rl.engine.refit import ModelRefit

HIDDEN, HEADS, HEAD, STATE, KERNEL, RANKS = 32, 4, 16, 8, 4, 2
INNER = HEADS * HEAD
CONVOLVED = INNER + 2 * 2 * STATE  # of Mamba2: x, and B and C of two groups


def mamba2(groups: int = 2) -> nn.Module:
    """Nemotron-H, Granite hybrid, Zamba2; with one group, which ranks share, most of Falcon-H1."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

    sizes = {"intermediate_size": INNER, "n_groups": groups, "num_heads": HEADS, "head_dim": HEAD}
    shape = Mamba2StateShape.create(
        tp_world_size=RANKS, state_size=STATE, conv_kernel=KERNEL, **sizes
    )
    params = Mamba2CacheParams(shape=shape, layers=[0])
    return MambaMixer2(params, HIDDEN, use_conv_bias=True, use_bias=False, n_groups=groups)


def kimi_delta() -> nn.Module:
    """Kimi-Linear; Kimi-K3 and GLM-5.3 have ones that are alike."""
    from sglang.srt.models.kimi_linear import KimiDeltaAttention

    attention = {"head_dim": HEAD, "num_heads": HEADS, "short_conv_kernel_size": KERNEL}
    config = SimpleNamespace(linear_attn_config=attention, dtype=torch.float32)
    return KimiDeltaAttention(0, HIDDEN, config)


def delta_net() -> nn.Module:
    """Qwen3.5, dense and MoE; Qwen3-Next has one that is alike."""
    from sglang.srt.models.qwen3_5 import Qwen3_5GatedDeltaNet

    config = SimpleNamespace(
        hidden_size=HIDDEN,
        linear_num_value_heads=HEADS,
        linear_num_key_heads=HEADS,
        linear_key_head_dim=HEAD,
        linear_value_head_dim=HEAD,
        linear_conv_kernel_dim=KERNEL,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        output_gate_type=None,
    )
    return Qwen3_5GatedDeltaNet(config, 0)


def short_conv() -> nn.Module:
    """LFM2."""
    from sglang.srt.models.lfm2 import Lfm2ShortConv

    config = SimpleNamespace(hidden_size=HIDDEN, conv_L_cache=KERNEL, conv_bias=True)
    return Lfm2ShortConv(config, 0)


# Of each part: names of a checkpoint to the shape of the whole tensor, the parameter, and its part of that.
CONV, CONV_OF = "conv1d.weight", "qkv_conv1d.weight"
PARTS: dict[str, tuple] = {
    "mamba2": (
        mamba2,
        {
            "A_log": ((HEADS,), "A"),
            "D": ((HEADS,), "D"),
            "dt_bias": ((HEADS,), "dt_bias"),
            CONV: ((CONVOLVED, 1, KERNEL), CONV),
            "conv1d.bias": ((CONVOLVED,), "conv1d.bias"),
            "norm.weight": ((INNER,), "norm.weight"),
        },
    ),
    "mamba2 of one group": (
        functools.partial(mamba2, groups=1),
        {
            CONV: ((INNER + 2 * STATE, 1, KERNEL), CONV),
            "conv1d.bias": ((INNER + 2 * STATE,), "conv1d.bias"),
            "in_proj.weight": ((2 * INNER + 2 * STATE + HEADS, HIDDEN), "in_proj.weight"),
        },
    ),
    "delta_net": (
        delta_net,
        {
            "A_log": ((HEADS,), "A_log"),
            "dt_bias": ((HEADS,), "dt_bias"),
            CONV: ((3 * INNER, 1, KERNEL), CONV),
        },
    ),
    "kimi_delta": (
        kimi_delta,
        {
            "A_log": ((1, 1, HEADS, 1), "A_log"),
            "dt_bias": ((INNER,), "dt_bias"),
            "q_conv1d.weight": ((INNER, 1, KERNEL), CONV_OF, 0),
            "k_conv1d.weight": ((INNER, 1, KERNEL), CONV_OF, 1),
            "v_conv1d.weight": ((INNER, 1, KERNEL), CONV_OF, 2),
            "q_proj.weight": ((INNER, HIDDEN), "fused_qkvbfg_a_proj.weight", 0),
            "k_proj.weight": ((INNER, HIDDEN), "fused_qkvbfg_a_proj.weight", 1),
            "v_proj.weight": ((INNER, HIDDEN), "fused_qkvbfg_a_proj.weight", 2),
            "b_proj.weight": ((HEADS, HIDDEN), "fused_qkvbfg_a_proj.weight", 3),
            "f_a_proj.weight": ((HEAD, HIDDEN), "fused_qkvbfg_a_proj.weight", 4),
            "g_a_proj.weight": ((HEAD, HIDDEN), "fused_qkvbfg_a_proj.weight", 5),
            "f_b_proj.weight": ((INNER, HEAD), "fused_fg_b_proj.weight", 0),
            "g_b_proj.weight": ((INNER, HEAD), "fused_fg_b_proj.weight", 1),
        },
    ),
    "short_conv": (
        short_conv,
        {
            "conv.weight": ((HIDDEN, KERNEL), "conv_weight"),
            "conv.bias": ((HIDDEN,), "conv_bias"),
        },
    ),
}
NAMES = [(part, name) for part, (_, named) in PARTS.items() for name in named]
CONVOLUTIONS = [(part, name) for part, name in NAMES if name.endswith("conv1d.weight")]


class Model(nn.Module):
    """One part, whose tensors go to its parameters by name."""

    def __init__(self, part: str, rank: int) -> None:
        super().__init__()
        build, self.named = PARTS[part]
        ranks = {"tp_size": RANKS, "tp_rank": rank, "attn_tp_size": RANKS, "attn_tp_rank": rank}
        from sglang.srt import runtime_context

        with runtime_context.get_parallel().override(enable_cp_tp_group_sharing=False, **ranks):
            self.part = build()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            _, place, *shard = self.named[name]
            parameter = self.part.get_parameter(place)
            parameter.weight_loader(parameter, tensor, *shard)


def weights(part: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator)
        for name, (shape, *_) in PARTS[part][1].items()
    }


def loaded(part: str, rank: int, seed: int = 0) -> ModelRefit:
    """As a rank of a server that was started on these weights."""
    model = Model(part, rank)
    refit = ModelRefit(model, Options(), {}, list)
    refit.attach()
    model.load_weights(iter(weights(part, seed).items()))
    return refit


def bytes_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {place for _, place, *_ in model.named.values()}
    return {name: copy.deepcopy(model.part.get_parameter(name).data) for name in named}


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, one in expected.items():
        assert torch.equal(found[name].view(torch.uint8), one.view(torch.uint8)), name
