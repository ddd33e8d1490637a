"""Which kernel a linear layer gets, and what SGLang is kept from deciding by itself. No GPU, no model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
from sglang_fp8rl.engine.modules import built, linear
from sglang_fp8rl.engine.modules.linear import Fp8BlockwiseOnlineLinearMethod
from sglang_fp8rl.scheme import decide_scheme

SCALES = {"blockwise": "weight_scale_inv", "per_channel": "weight_scale"}


def method_of(granularity: str, *, keeps_activations: bool) -> Fp8BlockwiseOnlineLinearMethod:
    """As `decide` leaves it."""
    method = object.__new__(Fp8BlockwiseOnlineLinearMethod)
    scheme = decide_scheme("", "per_channel", granularity)
    method.fp8rl_scheme = replace(scheme, keeps_activations=keeps_activations)
    method.block_quant, method.served = granularity == "blockwise", None
    method.w8a8_block_fp8_linear = linear.deepgemm_w8a8_block_fp8_linear_with_fallback
    return method


@pytest.mark.parametrize("granularity", SCALES)
def test_with_activations_in_bf16_the_kernel_gets_the_stored_codes_and_scales(
    monkeypatch, granularity
):
    monkeypatch.setattr(linear, "linear", lambda *arguments: arguments)
    weights = {name: object() for name in ("weight", SCALES[granularity])}
    layer, x, bias = SimpleNamespace(**weights), object(), object()
    method = method_of(granularity, keeps_activations=True)
    assert method.apply(layer, x, bias) == (x, *weights.values(), bias)


@pytest.mark.parametrize("keeps_activations", [False, True])
def test_scales_are_packed_for_fp8_activations_only(monkeypatch, keeps_activations):
    """And SGLang, which would requantize the weight for its own kernel, is not asked."""
    monkeypatch.setattr(linear, "takes_packed_scales", lambda *_, **__: True)
    method = method_of("blockwise", keeps_activations=keeps_activations)
    layer = SimpleNamespace(weight=torch.zeros(128, 128))
    assert method.reads_packed_scales(layer) is not keeps_activations
    if keeps_activations:
        method.process_weights_after_loading(layer)
        assert method.served is None


@pytest.mark.parametrize("is_ours", [False, True])
def test_sglangs_fused_gate_and_up_projection_is_turned_off_for_our_layers_only(is_ours):
    method = method_of("per_channel", keeps_activations=False) if is_ours else object()
    mlp = torch.nn.Module()
    mlp.gate_up_proj = torch.nn.Module()
    mlp.gate_up_proj.quant_method = method
    mlp.dual_gemm = SimpleNamespace(mode="dynamic per token")
    built._leave_fusions(torch.nn.ModuleList([mlp, torch.nn.Linear(1, 1)]))
    assert (mlp.dual_gemm.mode is None) is is_ours
