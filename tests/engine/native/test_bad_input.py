"""What must not be taken in silence: an error with tensor, value, rule and remedy; then life goes on.

More of these is in the table of faults (`support/faults`), which a server and an engine go through.
"""

from __future__ import annotations

import pytest
import torch
from support.by_definition import quantize_blockwise
from support.engine.commands import parameter, status
from support.engine.models import MODELS
from support.engine.pool import on

pytestmark = [pytest.mark.engine, on("qwen3-tp1", "qwen3-tp2")]

MODEL = MODELS["qwen3"]
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        (DOWN.replace("down_proj", "donw_proj"), DOWN),
        # SGLang's loader raises a KeyError with a name of its own making.
        ("model.layers.0.self_attn.v_proj.wieght", "model.layers.0.self_attn.v_proj.weight"),
    ],
    ids=["whole", "part of a fused module"],
)
def test_a_name_that_no_parameter_takes_is_refused_with_near_matches(host, wrong, meant):
    words = ("no parameter takes", "Near matches", meant, "unknown_names")
    host.refuses([(wrong, MODEL.first[meant])], wrong, *words)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.down_proj.base_layer.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "model.layers.0.self_attn.q_proj.lora_B.weight",
    ],
)
def test_a_name_of_an_adapter_is_not_taken_for_a_misspelt_weight(host, name):
    """Nor is it to be let pass: what is served would be the base without it."""
    said = host.refuses([(name, MODEL.first[DOWN])], name, "of an adapter", "merge it before")
    assert "Near matches" not in said
    assert "unknown_names" not in said


def test_rotary_tables_and_other_names_skipped_by_design_pass(host):
    tensors = [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(32)),
        (DOWN, MODEL.first[DOWN]),
    ]
    host.send(tensors)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (DOWN, (256, 256)),
        (DOWN, (256, 1024)),
        ("model.layers.0.self_attn.k_proj.weight", (256, 256)),
        ("model.layers.0.mlp.gate_proj.weight", (1024, 256)),
        ("model.embed_tokens.weight", (100, 256)),
        (NORM, (255,)),
    ],
)
def test_a_wrong_shape_is_refused_even_where_sglang_would_cut_it(host, name, shape):
    host.refuses_and_keeps([(name, torch.ones(shape))], name, str(shape))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e5m2])
def test_a_wrong_dtype_is_refused(host, dtype):
    host.refuses([(DOWN, torch.ones(256, 512).to(dtype))], DOWN, str(dtype), "FP32, BF16 or FP16")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_block_that_is_not_finite_keeps_its_old_bytes_and_is_named(host, value):
    before = [host.call_all(parameter, f"{DOWN}{suffix}") for suffix in ("", "_scale_inv")]
    weight = MODEL.second[DOWN].clone()
    weight[130, 500] = value  # block (1, 3): at TP=2 it lives on rank 1, and rank 0 answers
    host.refuses([(DOWN, weight)], DOWN, "NaN or Inf in 1 of", "old bytes")
    after = [host.call_all(parameter, f"{DOWN}{suffix}") for suffix in ("", "_scale_inv")]
    old, new = (torch.cat(found[0], 1) for found in (before, after))
    assert torch.equal(new[128:, 384:], old[128:, 384:])
    expected, scales = quantize_blockwise(MODEL.second[DOWN])
    changed = new[:128]
    assert torch.equal(changed, expected.view(torch.uint8)[:128])
    whole = torch.cat(after[1], 1)
    assert whole[1, 3] == torch.cat(before[1], 1)[1, 3]
    assert torch.equal(whole[0], scales[0])


def test_a_scale_sent_beside_a_bf16_weight_is_refused(host):
    _, scales = quantize_blockwise(MODEL.second[DOWN])
    tensors = [(DOWN, MODEL.second[DOWN]), (f"{DOWN}_scale_inv", scales)]
    host.refuses(tensors, "a scale without its FP8 weight")


def test_a_bf16_tensor_never_lands_in_fp8_without_its_scale(host):
    """SGLang's silent hole: its loaders cast, and leave the old scale."""
    for name in ("mlp.down_proj", "self_attn.q_proj", "mlp.up_proj"):
        full = f"model.layers.0.{name}.weight"
        host.send([(full, MODEL.first[full] * 1000)])
    scales = torch.cat(host.call_all(parameter, f"{DOWN}_scale_inv"), 1)
    _, expected = quantize_blockwise(MODEL.first[DOWN] * 1000)
    assert torch.equal(scales, expected)


@pytest.mark.parametrize("shape", [(2, 3), (256, 1), (4, 2), (2, 4, 1)])
def test_a_scale_of_the_wrong_shape_is_refused(host, shape):
    codes, _ = quantize_blockwise(MODEL.second[DOWN])
    tensors = [(DOWN, codes), (f"{DOWN}_scale_inv", torch.ones(shape))]
    host.refuses_and_keeps(tensors, "weight_scale_inv", str(shape), "(2, 4)")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_nan_is_refused(host, code):
    codes, scales = quantize_blockwise(MODEL.second[DOWN])
    codes.view(torch.uint8)[200, 7] = code
    tensors = [(DOWN, codes), (f"{DOWN}_scale_inv", scales)]
    host.refuses_and_keeps(tensors, DOWN, "NaN", "0x7F or 0xFF")


def test_a_partial_update_of_a_fused_module_is_allowed_and_reported(host):
    name = "model.layers.0.mlp.gate_proj.weight"
    host.send([(name, MODEL.second[name])])
    state = host.call(status)
    assert not state["consistent"]
    assert any("gate_up_proj.weight: only 50% is new" in line for line in state["problems"])
