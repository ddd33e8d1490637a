"""What must not be taken in silence: an error with tensor, value, rule and remedy; then life goes on."""

from __future__ import annotations

import base64
import pickle

import pytest
import torch
from support.by_definition import quantize_blockwise
from support.engine.commands import digests, parameter, send, status, update, update_from_disk
from support.engine.models import MODELS
from support.engine.pool import on

pytestmark = [pytest.mark.engine, on("qwen3-tp1", "qwen3-tp2")]

MODEL = MODELS["qwen3"]
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(autouse=True)
def _afterwards_the_engine_takes_a_full_update_and_is_whole_again(host):
    yield
    host.send(list(MODEL.first.items()))
    assert host.call_all(digests) == host.as_loaded.digests
    state = host.call(status)
    assert state["consistent"], state["problems"]


def refused(host, tensors, *words, **options):
    """Send and expect a refusal that says all of `words`, and a status that knows."""
    results = host.call_all(update, tensors, *options.values())
    assert not results[0][0], results
    for word in words:
        assert word in results[0][1], (word, results[0][1])
    state = host.call(status)
    assert not state["consistent"]
    assert state["last_refit"]["outcome"] == "failed"
    return results[0][1]


def test_a_name_that_no_parameter_takes_is_refused_with_near_matches(host):
    wrong = DOWN.replace("down_proj", "donw_proj")
    refused(host, [(wrong, MODEL.first[DOWN])], wrong, "Near matches", DOWN, "unknown_names")


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
    said = refused(host, [(name, MODEL.first[DOWN])], name, "of an adapter", "merge it before")
    assert "Near matches" not in said
    assert "unknown_names" not in said


def test_a_misspelt_part_of_a_fused_module_is_told_by_the_name_that_was_sent(host):
    """SGLang's loader raises a KeyError with a name of its own making."""
    wrong = "model.layers.0.self_attn.v_proj.wieght"
    tensor = MODEL.first[wrong.replace("wieght", "weight")]
    refused(host, [(wrong, tensor)], wrong, "no parameter takes", "Near matches")


def test_a_sparse_tensor_is_refused(host):
    refused(host, [(DOWN, MODEL.first[DOWN].to_sparse())], DOWN, "all of its elements in memory")


def test_rotary_tables_and_other_names_skipped_by_design_pass(host):
    tensors = [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(32)),
        (DOWN, MODEL.first[DOWN]),
    ]
    assert all(ok for ok, _ in host.call_all(update, tensors))


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
    before = host.call_all(digests)
    refused(host, [(name, torch.ones(shape))], name, str(shape))
    assert host.call_all(digests) == before


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e5m2])
def test_a_wrong_dtype_is_refused(host, dtype):
    refused(host, [(DOWN, torch.ones(256, 512).to(dtype))], DOWN, str(dtype), "FP32, BF16 or FP16")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_block_that_is_not_finite_keeps_its_old_bytes_and_is_named(host, value):
    before = [host.call_all(parameter, f"{DOWN}{suffix}") for suffix in ("", "_scale_inv")]
    weight = MODEL.second[DOWN].clone()
    weight[130, 500] = value  # block (1, 3): at TP=2 it lives on rank 1
    refused(host, [(DOWN, weight)], DOWN, "NaN or Inf in 1 of", "old bytes")
    after = [host.call_all(parameter, f"{DOWN}{suffix}") for suffix in ("", "_scale_inv")]
    old, new = (torch.cat(found[0], 1) for found in (before, after))
    assert torch.equal(new[128:, 384:], old[128:, 384:])
    expected, scales = quantize_blockwise(MODEL.second[DOWN])
    changed = new[:128]
    assert torch.equal(changed, expected.view(torch.uint8)[:128])
    whole = torch.cat(after[1], 1)
    assert whole[1, 3] == torch.cat(before[1], 1)[1, 3]
    assert torch.equal(whole[0], scales[0])


def test_a_norm_that_is_not_finite_is_not_stored(host):
    before = host.call_all(digests)
    weight = MODEL.second[NORM].clone()
    weight[3] = float("nan")
    refused(host, [(NORM, weight)], NORM, "NaN or Inf")
    assert host.call_all(digests) == before


def test_fp8_without_its_scale_is_refused_and_not_stored(host):
    before = host.call_all(digests)
    codes, _ = quantize_blockwise(MODEL.second[DOWN])
    refused(host, [(DOWN, codes)], DOWN, "FP8 without its scale", "together")
    assert host.call_all(digests) == before


def test_a_scale_without_its_weight_is_refused_and_not_stored(host):
    before = host.call_all(digests)
    _, scales = quantize_blockwise(MODEL.second[DOWN])
    refused(host, [(f"{DOWN}_scale_inv", scales)], "a scale without its FP8 weight")
    assert host.call_all(digests) == before


def test_a_scale_sent_beside_a_bf16_weight_is_refused(host):
    _codes, scales = quantize_blockwise(MODEL.second[DOWN])
    tensors = [(DOWN, MODEL.second[DOWN]), (f"{DOWN}_scale_inv", scales)]
    refused(host, tensors, "a scale without its FP8 weight")


def test_a_bf16_tensor_never_lands_in_fp8_without_its_scale(host):
    """SGLang's silent hole: its loaders cast, and leave the old scale."""
    for name in ("mlp.down_proj", "self_attn.q_proj", "mlp.up_proj"):
        full = f"model.layers.0.{name}.weight"
        huge = MODEL.first[full] * 1000
        assert all(ok for ok, _ in host.call_all(update, [(full, huge)]))
    scales = torch.cat(host.call_all(parameter, f"{DOWN}_scale_inv"), 1)
    _, expected = quantize_blockwise(MODEL.first[DOWN] * 1000)
    assert torch.equal(scales, expected)


@pytest.mark.parametrize("shape", [(2, 3), (256, 1), (4, 2), (2, 4, 1)])
def test_a_scale_of_the_wrong_shape_is_refused(host, shape):
    before = host.call_all(digests)
    codes, _ = quantize_blockwise(MODEL.second[DOWN])
    tensors = [(DOWN, codes), (f"{DOWN}_scale_inv", torch.ones(shape))]
    refused(host, tensors, "weight_scale_inv", str(shape), "(2, 4)")
    assert host.call_all(digests) == before


def test_a_scale_that_is_not_positive_is_refused(host):
    codes, scales = quantize_blockwise(MODEL.second[DOWN])
    scales[1, 1] = 0
    refused(host, [(DOWN, codes), (f"{DOWN}_scale_inv", scales)], "positive finite")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_nan_is_refused(host, code):
    before = host.call_all(digests)
    codes, scales = quantize_blockwise(MODEL.second[DOWN])
    codes.view(torch.uint8)[200, 7] = code
    refused(host, [(DOWN, codes), (f"{DOWN}_scale_inv", scales)], DOWN, "NaN", "0x7F or 0xFF")
    assert host.call_all(digests) == before


def test_an_empty_list_is_refused(host):
    refused(host, [], "empty list")


@pytest.mark.parametrize(
    "payload",
    [
        b"not base64 at all",
        base64.b64encode(b"not a pickle"),
        base64.b64encode(pickle.dumps({"no": "tensors"})),
    ],
)
def test_a_payload_that_cannot_be_read_fails_the_request_not_the_server(host, payload):
    results = host.call_all(send, [payload.decode("latin1")] * host.tp_size)
    assert not results[0][0]
    assert "update_weights_from_tensor" in results[0][1]


def test_too_few_payloads_for_the_ranks_fail_the_request(host):
    results = host.call_all(send, [])
    assert not results[0][0]


def test_load_format_direct_is_refused_with_the_reason(host):
    results = host.call_all(update, [(DOWN, MODEL.first[DOWN])], "direct")
    assert not results[0][0]
    assert "leave FP8 scales behind" in results[0][1]


def test_a_directory_that_is_not_there_fails_the_request_not_the_server(host, tmp_path):
    results = host.call_all(update_from_disk, str(tmp_path / "nothing"))
    assert not results[0][0]


def test_a_partial_update_of_a_fused_module_is_allowed_and_reported(host):
    name = "model.layers.0.mlp.gate_proj.weight"
    assert all(ok for ok, _ in host.call_all(update, [(name, MODEL.second[name])]))
    state = host.call(status)
    assert not state["consistent"]
    assert any("gate_up_proj.weight: only 50% is new" in line for line in state["problems"])


def test_what_one_rank_alone_can_see_reaches_the_client(host):
    """A NaN in the last column: at TP=2 only rank 1 holds it, and only rank 0 answers."""
    weight = MODEL.first[DOWN].clone()
    weight[0, 511] = float("nan")
    results = host.call_all(update, [(DOWN, weight)])
    assert not results[0][0]
    assert DOWN in results[0][1]
