"""Which kernel a linear layer gets, and what SGLang is kept from deciding by itself. No GPU, no model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
from sglang.srt import runtime_context

from sglang_fp8rl.config import Options
from sglang_fp8rl.engine.modules import built, linear
from sglang_fp8rl.engine.modules.linear import Fp8BlockwiseOnlineLinearMethod
from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.formats import FORMATS
from sglang_fp8rl.lab.cpu_platform.cpu_linear import apply_fp8_linear, block_fp8_linear
from sglang_fp8rl.lab.sensitivity.sqnr import sqnr_db
from sglang_fp8rl.numerics import dequantize, quantize
from sglang_fp8rl.scheme import decide_scheme


def method_of(
    granularity: str, *, keeps_activations: bool, **options
) -> Fp8BlockwiseOnlineLinearMethod:
    """As `decide` leaves it."""
    method = object.__new__(Fp8BlockwiseOnlineLinearMethod)
    scheme = decide_scheme("", "per_channel", granularity)
    method.fp8rl_scheme = replace(scheme, keeps_activations=keeps_activations)
    method.weight_block_size, method.served = scheme.format.weight_block_size, None
    method.block_quant = method.weight_block_size is not None
    method.quant_config = SimpleNamespace(options=Options(**options))
    method.w8a8_block_fp8_linear = linear.deepgemm_w8a8_block_fp8_linear_with_fallback
    return method


def layer_of(
    granularity: str, rows: int = 256, columns: int = 384
) -> tuple[SimpleNamespace, torch.Tensor]:
    """A layer, and the values of its weight."""
    held = FORMATS[granularity]
    block = held.grid((rows, columns)).block
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    codes, scale = quantize(0.1 * weight, block)
    layer = SimpleNamespace(weight=codes, **{held.scale_name("weight"): scale})
    return layer, dequantize(codes, scale, block, torch.float32).double()


@pytest.mark.parametrize("most", [16, 3])
@pytest.mark.parametrize("granularity", FORMATS)
def test_few_tokens_get_our_product_and_more_of_them_sglang_s(monkeypatch, granularity, most):
    seen = []
    monkeypatch.setattr(linear, "linear", lambda x, *_: seen.append("ours") or x)
    method = method_of(granularity, keeps_activations=True, exact_product_tokens=most)
    monkeypatch.setattr(
        method, "_with_quantized", lambda layer, x, bias: seen.append((len(x), bias)) or x
    )
    layer, _ = layer_of(granularity)
    for tokens in (0, 1, most, most + 1):
        x = torch.randn(tokens, 1, 384).bfloat16()
        assert method.apply(layer, x).shape == x.shape
    assert seen == ["ours", "ours", "ours", (2 * (most + 1), None)]


@pytest.mark.parametrize(
    ("tokens", "width", "rows"),
    [
        *((32, 24576, 64), (33, 24576, 192), (64, 24576, 192), (65, 24576, 130)),
        *((64, 21120, 128), (64, 21121, 192), (64, 25344, 192), (64, 25345, 128)),
    ],
)
def test_rows_that_deepgemm_is_slow_at_are_padded_and_the_rest_is_left_out(
    monkeypatch, tokens, width, rows
):
    seen, method = [], method_of("blockwise", keeps_activations=True)
    monkeypatch.setattr(linear, "_multiprocessors", lambda x: 132)
    monkeypatch.setattr(method, "_with_quantized", lambda _, x, bias: seen.append(len(x)) or x)
    layer = SimpleNamespace(weight=torch.empty(width, 384), weight_scale_inv=torch.ones(width, 3))
    x = torch.randint(-1, 2, (tokens, 1, 384)).bfloat16()  # which halves add up to exactly
    assert torch.equal(method.apply(layer, x), x)
    method.served = layer  # scales are packed for Blackwell's kernel
    method.apply(layer, x)
    method.served = None
    monkeypatch.setattr(linear, "_multiprocessors", lambda x: 78)
    method.apply(layer, x)
    method.w8a8_block_fp8_linear = block_fp8_linear
    method.apply(layer, x)
    assert seen == [rows, *[2 * tokens] * 3]
    method = method_of("per_channel", keeps_activations=True)
    monkeypatch.setattr(linear, "_multiprocessors", lambda x: 132)
    monkeypatch.setattr(method, "_with_quantized", lambda _, x, bias: seen.append(len(x)) or x)
    layer.weight_scale = torch.ones(width, 1)
    method.apply(layer, x)
    assert seen[4:] == [2 * tokens]


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("granularity", FORMATS)
def test_doubled_rows_are_as_near_as_bf16_s_and_a_bias_is_added_once(
    monkeypatch, granularity, pow2
):
    options = {"exact_product_tokens": 0, "use_activation_pow2_scale": pow2}
    method = method_of(granularity, keeps_activations=True, **options)
    host = partial(block_fp8_linear, act_scale_ue8m0=pow2)
    monkeypatch.setattr(
        method, "_with_quantized", lambda layer, x, bias: (
            host(x, layer.weight, [128, 128], layer.weight_scale_inv, None, bias)
            if method.block_quant
            else apply_fp8_linear(x, layer.weight.t(), layer.weight_scale, bias=bias)
        ),
    )  # fmt: skip
    layer, held = layer_of(granularity)
    x = torch.randn(5, 8, 384, generator=torch.Generator().manual_seed(2)).bfloat16()
    bias = torch.randn(256, generator=torch.Generator().manual_seed(3)).bfloat16()
    exact = x.double() @ held.t() + bias.double()
    found = method.apply(layer, x, bias)
    assert (found.shape, found.dtype) == (exact.shape, torch.bfloat16)
    assert sqnr_db(exact, found.double()) > 50
    assert sqnr_db(exact, method._with_quantized(layer, x, bias).double()) < 35


@pytest.mark.parametrize("keeps_activations", [False, True])
def test_scales_are_packed_for_doubled_rows_too_which_are_then_split_by_powers_of_two(
    monkeypatch, keeps_activations
):
    """And SGLang, which would requantize the weight for its own kernel, is not asked."""
    monkeypatch.setattr(linear, "takes_packed_scales", lambda *_, **__: True)
    method = method_of("blockwise", keeps_activations=keeps_activations, exact_product_tokens=0)
    layer = SimpleNamespace(weight=torch.zeros(128, 128), weight_scale_inv=torch.ones(1, 1))
    assert method.reads_packed_scales(layer)
    packed = SimpleNamespace(derive=lambda: None)
    method.served = packed
    method.process_weights_after_loading(layer)
    seen = []
    monkeypatch.setattr(linear, "doubled", lambda x, *how: seen.append(how) or torch.cat([x, x]))
    monkeypatch.setattr(linear.Fp8LinearMethod, "apply", lambda _, given, x, bias: (
        seen.append(given) or x
    ))  # fmt: skip
    method.apply(layer, torch.zeros(2, 128).bfloat16())
    assert seen == ([(128, True), packed] if keeps_activations else [packed])


@pytest.mark.parametrize("option", ["enable_deterministic_inference", "rl_on_policy_target"])
def test_one_product_for_all_batches_is_asked_for_where_inference_is_deterministic(
    monkeypatch, option
):
    server = SimpleNamespace(enable_deterministic_inference=False, rl_on_policy_target=None)
    setattr(server, option, "fsdp")
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: server)
    for keeps_activations, most in ((False, 16), (True, 0), (True, 16)):
        method = method_of("blockwise", keeps_activations=keeps_activations)
        options = Options(exact_product_tokens=most)
        config = SimpleNamespace(options=options, schemes={"layer": method.fp8rl_scheme})
        is_served = not (keeps_activations and most)
        with nullcontext() if is_served else pytest.raises(ConfigError, match="exact_product"):
            built._check_one_product(config)


@pytest.mark.parametrize("keeps_activations", [False, True])
@pytest.mark.parametrize("granularity", FORMATS)
def test_shared_experts_that_take_no_quantized_activations_are_handed_none(
    monkeypatch, granularity, keeps_activations
):
    model, gate_up = torch.nn.Module(), torch.nn.Module()
    gate_up.quant_method = method_of(granularity, keeps_activations=keeps_activations)
    model.shared_experts = torch.nn.Module()
    model.shared_experts.gate_up_proj = gate_up
    built._check_quantized_once(model)
    monkeypatch.setenv("SGLANG_OPT_MOE_QUANT_ONCE", "1")
    is_served = granularity == "blockwise" and not keeps_activations
    with nullcontext() if is_served else pytest.raises(ConfigError, match="MOE_QUANT_ONCE"):
        built._check_quantized_once(model)


@pytest.mark.parametrize("is_ours", [False, True])
def test_sglangs_fused_gate_and_up_projection_is_turned_off_for_our_layers_only(is_ours):
    method = method_of("per_channel", keeps_activations=False) if is_ours else object()
    mlp = torch.nn.Module()
    mlp.gate_up_proj = torch.nn.Module()
    mlp.gate_up_proj.quant_method = method
    mlp.dual_gemm = SimpleNamespace(mode="dynamic per token")
    built._leave_fusions(torch.nn.ModuleList([mlp, torch.nn.Linear(1, 1)]))
    assert (mlp.dual_gemm.mode is None) is is_ours
