"""The CPU platform's fused experts against an oracle in FP64, token by token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_fp8rl.lab.cpu_platform.cpu_linear import quantize_per_token_group
from sglang_fp8rl.lab.cpu_platform.cpu_moe import fused_experts

TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 9, 4, 2, 256, 160
BLOCK = [128, 128]


def config(**changes: object) -> SimpleNamespace:
    fields = {
        "activation": "silu",
        "apply_router_weight_on_input": False,
        "routed_scaling_factor": None,
        "inplace": False,
        "no_combine": False,
        "is_gated": True,
        "gemm1_alpha": None,
        "gemm1_clamp_limit": None,
        "swiglu_limit": None,
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.fixture
def layer() -> SimpleNamespace:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def e4m3(*shape: int) -> torch.Tensor:
        return (50 * draw(*shape)).to(torch.float8_e4m3fn)

    scores, ids = draw(TOKENS, EXPERTS).softmax(dim=1).topk(TOP_K)
    return SimpleNamespace(
        x=draw(TOKENS, HIDDEN).bfloat16(),
        w1=e4m3(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        w2=e4m3(EXPERTS, HIDDEN, INTERMEDIATE),
        blocks1=0.001 * 4 ** draw(EXPERTS, 3, 2),
        blocks2=0.001 * 4 ** draw(EXPERTS, 2, 2),
        rows1=0.001 * 4 ** draw(EXPERTS, 2 * INTERMEDIATE, 1),
        rows2=0.001 * 4 ** draw(EXPERTS, HIDDEN, 1),
        topk=(scores, ids, None),
    )


def fake_quantized(x: torch.Tensor, group: int) -> torch.Tensor:
    q, scale = quantize_per_token_group(x[None], group)  # checked by test_platform_kernels
    return (q.double() * scale.double().repeat_interleave(group, 1)[:, : x.numel()])[0]


def spread(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.shape[-1] == 1 and scale.shape[0] == weight.shape[0]:
        return weight.double() * scale.double()
    tiles = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.double() * tiles[: weight.shape[0], : weight.shape[1]]


def oracle(
    layer: SimpleNamespace, scale1: torch.Tensor, scale2: torch.Tensor, group: int | None
) -> torch.Tensor:
    scores, ids, _ = layer.topk
    result = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for score, expert in zip(scores[token], ids[token], strict=True):
            if expert < 0:
                continue
            x = fake_quantized(layer.x[token], group or HIDDEN)
            up_gate = (spread(layer.w1[expert], scale1[expert]) @ x).bfloat16().double()
            gate, up = up_gate[:INTERMEDIATE], up_gate[INTERMEDIATE:]
            inner = (gate * torch.sigmoid(gate) * up).bfloat16()
            inner = fake_quantized(inner, group or INTERMEDIATE)
            result[token] += score.double() * (spread(layer.w2[expert], scale2[expert]) @ inner)
    return result


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def run(
    layer: SimpleNamespace, kind: str, *, quantizes: bool = True, **changes: object
) -> torch.Tensor:
    scales = {"w1_scale": getattr(layer, f"{kind}1"), "w2_scale": getattr(layer, f"{kind}2")}
    block = BLOCK if kind == "blocks" else None
    return fused_experts(
        layer.x.clone(),
        layer.w1,
        layer.w2,
        layer.topk,
        config(**changes),
        use_fp8_w8a8=quantizes,
        per_channel_quant=block is None,
        block_shape=block,
        **scales,
    )


@pytest.mark.parametrize("kind", ["blocks", "rows"])
def test_sums_are_fp32_s_whatever_torch_s_default_dtype(layer: SimpleNamespace, kind: str) -> None:
    every = torch.arange(EXPERTS).repeat(TOKENS, 1)
    layer.topk = torch.rand(TOKENS, EXPERTS), every, None
    expected = run(layer, kind)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(run(layer, kind), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("kind", "group"), [("blocks", 128), ("rows", None)])
def test_experts_are_the_exact_sum_to_output_rounding(
    layer: SimpleNamespace, kind: str, group: int | None
) -> None:
    exact = oracle(layer, getattr(layer, f"{kind}1"), getattr(layer, f"{kind}2"), group)
    assert relative_error(run(layer, kind), exact) < 5e-3  # two BF16 roundings


def test_fp8_weights_without_quantized_activations_are_refused(layer: SimpleNamespace) -> None:
    with pytest.raises(NotImplementedError, match="B_scale"):
        run(layer, "blocks", quantizes=False)


def test_experts_of_other_ranks_add_nothing(layer: SimpleNamespace) -> None:
    layer.topk[1][:, 1] = -1
    exact = oracle(layer, layer.blocks1, layer.blocks2, 128)
    assert relative_error(run(layer, "blocks"), exact) < 5e-3
    layer.topk[1][:] = -1
    assert not run(layer, "blocks").any()


def test_a_token_does_not_depend_on_its_batch(layer: SimpleNamespace) -> None:
    whole = run(layer, "blocks")
    for token in range(TOKENS):
        one = SimpleNamespace(**vars(layer))
        one.x = layer.x[token : token + 1]
        one.topk = (layer.topk[0][token : token + 1], layer.topk[1][token : token + 1], None)
        assert torch.equal(run(one, "blocks")[0], whole[token])


def test_inplace_scaling_factor_and_slots(layer: SimpleNamespace) -> None:
    whole = run(layer, "blocks")
    assert torch.equal(run(layer, "blocks", inplace=True), whole)
    doubled = run(layer, "blocks", routed_scaling_factor=2.0)
    assert torch.equal(doubled, 2 * whole)
    slots = run(layer, "blocks", no_combine=True)
    assert slots.shape == (TOKENS, TOP_K, HIDDEN)
    assert torch.equal(slots.float().sum(dim=1).bfloat16(), whole)


def test_what_is_not_emulated_is_refused(layer: SimpleNamespace) -> None:
    with pytest.raises(NotImplementedError, match="swiglu_limit"):
        run(layer, "blocks", swiglu_limit=7.0)
    with pytest.raises(NotImplementedError, match="relu"):
        run(layer, "blocks", activation="relu2")
