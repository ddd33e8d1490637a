"""What modules cost, what a budget allows, what is taken, and what the server is told."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.eval.sensitivity_model import small_plan

from sglang_fp8rl.config import Options
from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.lab.sensitivity.finding import options_with
from sglang_fp8rl.lab.sensitivity.run import check_fits, free_bytes, needed_bytes
from sglang_fp8rl.lab.sensitivity.served_modules import (
    budget_bytes,
    choose,
    model_bytes,
    savings,
    served_modules,
)

MODULES = served_modules(small_plan())


def test_a_module_costs_its_bf16_less_its_codes_and_scales():
    cost = {module.name: module for module in MODULES}
    qkv = cost["model.layers.0.self_attn.qkv_proj"]
    assert (qkv.scheme, qkv.weights, qkv.scales) == ("per_channel", 256 * 128, 256)
    assert qkv.extra_bytes == 256 * 128 - 4 * 256
    gate_up = cost["model.layers.0.mlp.gate_up_proj"]
    assert (gate_up.scheme, gate_up.scales) == ("blockwise", 2 * 2)
    assert gate_up.kind == "mlp.gate_up_proj"
    experts = next(one for one in served_modules(small_plan("qwen3_moe")) if "expert" in one.name)
    assert experts.weights == 4 * 3 * 128 * 128
    plan = small_plan()
    elements = sum(torch.Size(one.shape).numel() for one in plan.tensors.values())
    assert model_bytes(plan, MODULES) == 2 * elements - savings(MODULES)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=len(MODULES), max_size=len(MODULES)),
    st.integers(0, 2 * savings(MODULES)),
)
def test_a_choice_is_greedy_and_within_its_budget(values, allowed):
    effects = {module.name: value for module, value in zip(MODULES, values, strict=True)}
    choice = choose(MODULES, effects, allowed)
    taken = set(choice.names)
    assert choice.extra_bytes == sum(one.extra_bytes for one in choice.modules) <= allowed
    worth = [effects[one.name] / one.extra_bytes for one in choice.modules]
    assert worth == sorted(worth, reverse=True)
    for module in MODULES:
        if module.name not in taken and effects[module.name] > 0:
            better = [
                m
                for m, w in zip(choice.modules, worth, strict=True)
                if w >= effects[module.name] / module.extra_bytes
            ]
            spent = sum(one.extra_bytes for one in better)
            assert spent + module.extra_bytes > allowed
    assert 0 <= choice.predicted_share <= 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10%", savings(MODULES) // 10),
        ("100%", savings(MODULES)),
        (" 12.5 % ", savings(MODULES) // 8),
        ("0.04MB", 40_000),
        ("32KiB", 32768),
        ("40000", 40_000),
    ],
)
def test_a_budget_is_a_share_of_the_savings_or_bytes(text, expected):
    assert budget_bytes(text, MODULES) == expected


@pytest.mark.parametrize("text", ["", "ten", "-5%", "5 percent", "1e6", "12XB", "%"])
def test_a_budget_that_can_t_be_read_is_refused(text):
    with pytest.raises(ConfigError, match="share of what FP8 saves, or bytes"):
        budget_bytes(text, MODULES)


def test_a_budget_that_nothing_fits_names_the_cheapest_module():
    cheapest = min(MODULES, key=lambda one: one.extra_bytes)
    with pytest.raises(ConfigError, match=rf"{cheapest.name}, costs {cheapest.extra_bytes} bytes"):
        budget_bytes(str(cheapest.extra_bytes - 1), MODULES)
    assert budget_bytes(str(cheapest.extra_bytes), MODULES) == cheapest.extra_bytes


def test_a_model_that_does_not_fit_is_refused_with_both_sizes():
    plan = small_plan()
    arguments = {"tokens": 1000, "tokens_at_once": 100}
    wide = needed_bytes(plan, value_bytes=4, **arguments)
    narrow = needed_bytes(plan, value_bytes=2, **arguments)
    elements = sum(torch.Size(one.shape).numel() for one in plan.tensors.values())
    assert wide > 4 * elements + 1000 * 4 * 64
    assert wide - narrow >= 2 * elements
    assert free_bytes("cpu") > 0
    check_fits("m", wide, wide, tokens=1000, device="cpu")
    with pytest.raises(ConfigError, match=r"3\.0 GB are needed .* 2\.0 GB are free on cpu"):
        check_fits("m", 3 * 10**9, 2 * 10**9, tokens=9, device="cpu")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "mps"])
def test_a_device_that_is_not_there_is_named(device):
    with pytest.raises(ConfigError, match=f"--device: '{device}'"):
        free_bytes(device)


def test_options_keep_what_the_plan_had_and_are_options():
    plan = small_plan(ignored_layers=["model.layers.2"], use_weight_pow2_scale=True)
    made = options_with(plan, ["model.layers.0.mlp.down_proj"])
    assert made == {
        "use_weight_pow2_scale": True,
        "ignored_layers": ["model.layers.2", "model.layers.0.mlp.down_proj"],
    }
    assert Options.from_dict(made).use_weight_pow2_scale
