"""Names of scales of the KV cache, as the systems that send them write them."""

from __future__ import annotations

import pytest

from sglang_fp8rl.wire.sent_names import kv_scale_name

LAYER = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("name", "attention", "side"),
    [
        (f"{LAYER}.k_scale", LAYER, "k"),
        (f"{LAYER}.v_scale", LAYER, "v"),
        (f"{LAYER}.attn.q_scale", LAYER, "q"),
        (f"{LAYER}.attn.k_scale", LAYER, "k"),
        (f"{LAYER}.attn.v_scale", LAYER, "v"),
        (f"{LAYER}.attn.prob_scale", LAYER, "prob"),
        (f"{LAYER}.k_proj.k_scale", LAYER, "k"),
        (f"{LAYER}.v_proj.v_scale", LAYER, "v"),
        (f"{LAYER}.qkv_proj.v_scale", LAYER, "v"),
        (f"model.language_{LAYER}.k_scale", f"model.language_{LAYER}", "k"),
    ],
)
def test_a_scale_of_the_kv_cache_is_known_by_every_sender_s_name(name, attention, side):
    found = kv_scale_name(name)
    assert (found.attention, found.side) == (attention, side)


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.k_proj.weight_scale",
        f"{LAYER}.k_proj.weight_scale_inv",
        f"{LAYER}.k_proj.input_scale",
        f"{LAYER}.k_proj.v_scale",
        f"{LAYER}.k_proj.weight",
        f"{LAYER}.k_norm.weight",
        f"{LAYER}.kv_scale",
        "k_scale",
        f"{LAYER}.k_scales",
    ],
)
def test_no_other_name_is_taken_for_one(name):
    assert kv_scale_name(name) is None
