"""`sglang-fp8rl plan` says what a server does, without loading anything."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import pytest
from support.engine import commands
from support.engine.models import MODELS, checkpoint
from support.engine.pool import on
from transformers import PhiConfig

from sglang_fp8rl.errors import HostError
from sglang_fp8rl.lab.plan_offline import make_plan

pytestmark = pytest.mark.engine
in_forks = pytest.mark.usefixtures("plans_in_forks")


@in_forks
@on("qwen3-tp1", "qwen3-tp2", "qwen3-one-kv-head-tp2")
def test_the_plan_is_the_server_s(checkpoint_dir, host):
    path = checkpoint(checkpoint_dir, host.model, "first")
    status = host.call(commands.status)
    plan = make_plan(str(path), tp_size=host.tp_size)
    assert plan.document["modules"] == status["plan"]
    assert Counter(one.scheme for one in plan.modules.values()) == status["schemes"]
    assert plan.document["fp8_bytes"] == status["fp8_bytes"]


def test_no_weights_are_needed_and_options_count(checkpoint_dir, tmp_path):
    """In an interpreter of its own, as a user's."""
    path = checkpoint(checkpoint_dir, MODELS["qwen3"], "first")
    shutil.copy(path / "config.json", tmp_path)
    plan = make_plan(str(tmp_path), tp_size=2, options={"misaligned": "bf16"})
    assert plan.modules["model.layers.0.self_attn.qkv_proj"].scheme == "high_precision"
    assert plan.modules["model.layers.0.mlp.down_proj"].scheme == "blockwise"


@in_forks
def test_a_pattern_that_matches_nothing_is_the_plan_s_error(checkpoint_dir):
    path = checkpoint(checkpoint_dir, MODELS["qwen3"], "first")
    with pytest.raises(HostError, match=r"no\.such\.module"):
        make_plan(str(path), options={"ignored_layers": ["no.such.module"]})


def test_a_model_that_sglang_does_not_know_is_an_error_with_its_log(tmp_path):
    """In an interpreter of its own, whose parent SGLang signals when it fails."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["NoSuchModel"]})
    )
    with pytest.raises(HostError, match="did not come to build the model"):
        make_plan(str(tmp_path))


@in_forks
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("qwen3", {}, {"mode": "certified", "layers": 2, "refused": ""}),
        ("qwen2-bias", {"kv_scales": "sent"}, {"mode": "sent", "layers": 2, "refused": ""}),
        ("gemma3", {"kv_scales": "unit"}, {"mode": "unit", "layers": 0, "refused": ""}),
        ("gemma3", {}, "no test shows this class served"),
    ],
)
def test_the_plan_says_how_an_fp8_kv_cache_would_be_scaled(checkpoint_dir, name, options, expected):
    path = checkpoint(checkpoint_dir, MODELS[name], "first")
    found = make_plan(str(path), options=options).document["kv_scales"]
    if isinstance(expected, str):
        assert expected in found["refused"]
        assert (found["mode"], found["layers"]) == ("certified", 0)
    else:
        assert found == expected


@pytest.fixture
def phi(tmp_path):
    """SGLang gives none of its modules a prefix; none but fc2 can be cut into blocks."""
    sizes = {"hidden_size": 320, "intermediate_size": 1280, "num_attention_heads": 4}
    config = PhiConfig(**sizes, num_hidden_layers=2, architectures=["PhiForCausalLM"])
    config.save_pretrained(tmp_path)
    return str(tmp_path)


@in_forks
def test_modules_that_share_a_prefix_are_planned_one_by_one(phi):
    plan = make_plan(phi, dtype="bfloat16")
    assert {name: one.scheme for name, one in plan.modules.items()} == {
        f"model.layers.{layer}.{module}": scheme
        for layer in (0, 1)
        for module, scheme in (
            ("self_attn.qkv_proj", "per_channel"),
            ("self_attn.dense", "per_channel"),
            ("mlp.fc1", "per_channel"),
            ("mlp.fc2", "blockwise"),
        )
    }
    assert {one["module"] for one in plan.document["tensors"].values()} >= plan.modules.keys()


@in_forks
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"misaligned": "error"}, "misaligned='error' allows it no fallback"),
        ({"num_first_layers_in_bf16": 1}, "num_first_layers_in_bf16: SGLang calls .*''.*misses it"),
        ({"num_last_layers_in_bf16": 1}, "num_last_layers_in_bf16: SGLang calls .*''.*misses it"),
        ({"ignored_layers": ["model.layers.0"]}, "ignored_layers: SGLang calls .*''.*misses it"),
        ({"ignored_layers": ["layers.0"]}, "ignored_layers: SGLang calls .*''.*misses it"),
        ({"ignored_layers": ["decoder"]}, "matches none of 8 modules, .*example 'model"),
    ],
)
def test_an_option_that_misses_modules_for_their_prefix_is_refused_by_name(phi, option, said):
    with pytest.raises(HostError, match=said):
        make_plan(phi, dtype="bfloat16", options=option)


@in_forks
def test_patterns_cover_a_fused_module_by_the_parts_that_its_model_tells(checkpoint_dir):
    path = checkpoint(checkpoint_dir, MODELS["deepseek-v3"], "first")
    parts = r"re:.*\.(q_a_proj|kv_a_proj_with_mqa)"
    modules = make_plan(str(path), options={"ignored_layers": [parts]}).modules
    assert modules["model.layers.0.self_attn.fused_qkv_a_proj_with_mqa"].scheme == "high_precision"


@in_forks
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_per_channel_for_every_module_when_asked_for(checkpoint_dir, name):
    path = checkpoint(checkpoint_dir, MODELS[name], "first")
    plan = make_plan(str(path), options={"granularity": "per_channel", "misaligned": "error"})
    found = {(one.scheme, one.reason) for one in plan.modules.values()}
    assert found == {("per_channel", "granularity='per_channel'")}
