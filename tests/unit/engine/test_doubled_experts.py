"""Experts with activations in BF16: SGLang's steps in the order of its runner, on doubled rows; no GPU, no model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
from sglang.kernels.ops.moe import fused_moe_triton_kernels
from sglang.srt.layers import activation
from sglang.srt.layers.moe.moe_runner import triton as triton_runner
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.topk import StandardTopKOutput

from sglang_fp8rl.engine.modules import experts
from sglang_fp8rl.lab.cpu_platform.cpu_moe import (
    fused_experts,
    grouped_product,
    sorted_by_expert,
)
from sglang_fp8rl.lab.sensitivity.sqnr import sqnr_db
from sglang_fp8rl.numerics import dequantize, quantize

EXPERTS, TOP_K, HIDDEN, INNER = 5, 2, 256, 128
CONFIG = MoeRunnerConfig(num_experts=EXPERTS, num_local_experts=EXPERTS, activation="silu")


@pytest.fixture(autouse=True)
def sglangs_kernels_in_torch(monkeypatch):
    monkeypatch.setattr(fused_moe_triton_kernels, "invoke_fused_moe_kernel", grouped_product)
    monkeypatch.setattr(triton_runner, "pre_permute_standard_to_triton", sorted_by_expert)
    on_policy = SimpleNamespace(rl_on_policy_target=None)
    monkeypatch.setattr(activation, "get_server_args", lambda: on_policy, raising=False)  # 0.5.16
    for name in ("SiluAndMul", "GeluAndMul"):
        host = getattr(experts, name)
        monkeypatch.setattr(host, "forward", host.forward_native, raising=False)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def served(*shape: int, blockwise: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and values."""
    block = (128, 128) if blockwise else (1, shape[-1])
    pairs = [quantize(0.1 * one, block) for one in drawn(*shape)]
    held = [dequantize(*pair, block, torch.float32).double() for pair in pairs]
    scales = torch.stack([scale for _, scale in pairs])
    scales = scales if blockwise else scales.view(shape[0], shape[1], 1)
    return torch.stack([codes for codes, _ in pairs]), scales, torch.stack(held)


class Case:
    def __init__(self, tokens: int, *, blockwise: bool) -> None:
        w13, s13, self.w13 = served(EXPERTS, 2 * INNER, HIDDEN, blockwise=blockwise)
        w2, s2, self.w2 = served(EXPERTS, HIDDEN, INNER, blockwise=blockwise)
        self.info = TritonMoeQuantInfo(
            w13, w2, use_fp8_w8a8=True, per_channel_quant=not blockwise, w13_scale=s13, w2_scale=s2,
            block_shape=[128, 128] if blockwise else None,
        )  # fmt: skip
        self.x = drawn(tokens, HIDDEN).bfloat16()
        logits = drawn(tokens, EXPERTS, seed=1)
        weights, ids = logits.softmax(1).topk(TOP_K)
        self.topk = StandardTopKOutput(weights, ids, logits)

    def run(self, config: MoeRunnerConfig = CONFIG) -> torch.Tensor:
        assert experts.unmade(config) == ""
        return experts.DoubledExperts(config).run(self.x, self.topk, self.info)

    def quantized(self) -> torch.Tensor:
        """What SGLang's own experts give."""
        info, config = self.info, replace(CONFIG, inplace=False)
        return fused_experts(
            self.x, info.w13_weight, info.w2_weight, self.topk, config, use_fp8_w8a8=True,
            per_channel_quant=info.per_channel_quant, w1_scale=info.w13_scale, w2_scale=info.w2_scale,
            block_shape=info.block_shape,
        )  # fmt: skip

    def exact(self, config: MoeRunnerConfig = CONFIG) -> torch.Tensor:
        result = torch.zeros(self.x.shape, dtype=torch.float64)
        nonlinear = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
        for token, (weights, ids) in enumerate(zip(*self.topk[:2], strict=True)):
            for weight, expert in zip(weights.double(), ids, strict=True):
                if expert < 0:
                    continue
                early = weight if config.apply_router_weight_on_input else 1.0
                gate, up = (early * self.w13[expert] @ self.x[token].double()).chunk(2)
                inner = nonlinear[config.activation](gate) * up
                late = 1.0 if config.apply_router_weight_on_input else weight
                result[token] += late * (self.w2[expert] @ inner)
        return result * (config.routed_scaling_factor or 1.0)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, activation="gelu", routed_scaling_factor=2.5),
        replace(CONFIG, apply_router_weight_on_input=True),
    ],
    ids=["silu", "gelu-scaled", "weights-on-input"],
)
@pytest.mark.parametrize("blockwise", [True, False], ids=["blocks", "rows"])
def test_activations_are_as_near_as_bf16_products(blockwise, config):
    case = Case(20, blockwise=blockwise)
    exact = case.exact(config)
    assert (
        sqnr_db(exact, case.run(config).double()) > 46
    )  # gate and up, SiLU, output: rounded to BF16
    if config is CONFIG:
        assert sqnr_db(exact, case.quantized().double()) < 33


def test_an_expert_of_another_rank_adds_nothing():
    case = Case(9, blockwise=True)
    case.topk.topk_ids[:, 1] = -1
    case.topk.topk_ids[3] = -1
    assert sqnr_db(case.exact(), case.run().double()) > 46
    assert not case.run()[3].any()


def test_no_token_and_many_give_their_own(monkeypatch):
    case = Case(11, blockwise=True)
    whole = case.run()
    monkeypatch.setattr(experts, "_TOKENS", 4)
    assert torch.equal(case.run(), whole)
    case.x, case.topk = case.x[:0], StandardTopKOutput(*(one[:0] for one in case.topk))
    assert case.run().shape == (0, HIDDEN)


def test_an_input_is_not_written():
    case = Case(5, blockwise=False)
    before = case.x.clone()
    case.run(replace(CONFIG, inplace=True))
    assert torch.equal(case.x, before)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no_combine": True}, "no_combine=True"),
        ({"swiglu_limit": 10.0}, "swiglu_limit=10.0"),
        ({"gemm1_alpha": 1.7}, "gemm1_alpha=1.7"),
        ({"is_gated": False}, "is_gated=False"),
        ({"activation": "relu2"}, "activation=relu2"),
    ],
)
def test_what_is_not_made_is_said(changes, words):
    assert words in experts.unmade(SimpleNamespace(**{**vars(CONFIG), **changes}))
