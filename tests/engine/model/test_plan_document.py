"""The plan says what a server's parameters are, and is one document wherever it is made."""

from __future__ import annotations

import shutil

import jsonschema
import pytest
from support.engine.commands import plan_document, stored
from support.engine.engine_host import EngineHost
from support.engine.models import MODELS, checkpoint
from support.engine.pool import on, runs_on
from support.fused_experts import with_fused_experts
from support.plans import plan_schema

from sglang_fp8rl.lab.plan_offline import make_plan
from sglang_fp8rl.lab.testing.checkpoints import save_checkpoint
from sglang_fp8rl.wire.plan import RefitPlan, digest_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("plans_in_forks")]


def checked(document) -> RefitPlan:
    jsonschema.Draft202012Validator(plan_schema()).validate(document)
    return RefitPlan.from_dict(document)


@on("llama-misaligned-tp2", "qwen3-moe-misaligned-tp2", slow=("qwen3-tied-tp1",))
def test_the_child_process_and_the_server_give_the_same_document(checkpoint_dir, host):
    path = checkpoint(checkpoint_dir, host.model, "first")
    served = host.call_all(plan_document)
    planned = make_plan(str(path), tp_size=host.tp_size).document
    assert all(document == planned for document in served)
    assert checked(planned).digest == served[0]["digest"]


@runs_on("mixtral")
@pytest.mark.parametrize("has_weights", [True, False])
def test_dummy_weights_give_the_document_of_the_checkpoint(checkpoint_dir, tmp_path, has_weights):
    """Without a load at startup the loaders are shown the names on `meta`."""
    path = checkpoint(checkpoint_dir, MODELS["mixtral"], "first")
    expected = make_plan(str(path)).document
    if not has_weights:
        shutil.copy(path / "config.json", tmp_path)
        path = tmp_path
    with EngineHost(path, args=("--load-format", "dummy")) as engine:
        before = engine.call(stored)
        assert engine.call(plan_document) == expected
        assert engine.call(stored) == before


@runs_on("qwen3-moe")
def test_experts_of_other_ranks_are_in_the_plan_like_those_of_this_one(checkpoint_dir):
    path = str(checkpoint(checkpoint_dir, MODELS["qwen3-moe"], "first"))
    document = make_plan(path, tp_size=2, ep_size=2).document
    found = checked(document)
    assert document["parallel"] == {"tp_size": 2, "ep_size": 2}
    for part in ("gate_proj", "up_proj", "down_proj"):
        entries = [
            found.of(f"model.layers.0.mlp.experts.{expert}.{part}.weight") for expert in range(4)
        ]
        assert all(entry.is_fp8_on_wire for entry in entries)
        assert len({entry.shape for entry in entries}) == 1


@runs_on("qwen3-moe")
def test_a_checkpoint_of_fused_experts_has_one_document_too(checkpoint_dir):
    model = MODELS["qwen3-moe"]
    path = save_checkpoint(
        checkpoint_dir / "qwen3-moe-fused-plan", model.config, with_fused_experts(model.first)
    )
    with EngineHost(path) as engine:
        served = engine.call(plan_document)
    assert served == make_plan(str(path)).document
    entry = checked(served).of("model.layers.0.mlp.experts.gate_up_proj")
    assert (entry.scheme, entry.dtype) == ("blockwise", "bfloat16")


@runs_on("mixtral")
def test_options_are_in_the_document_and_change_its_digest(checkpoint_dir):
    path = str(checkpoint(checkpoint_dir, MODELS["mixtral"], "first"))
    document = make_plan(path, options={"use_weight_pow2_scale": True}).document
    assert document["options"]["use_weight_pow2_scale"]
    assert document["digest"] == digest_of(document)
    without = {**document, "options": {**document["options"], "use_weight_pow2_scale": False}}
    assert digest_of(without) != document["digest"]
    assert checked(document).rounding == {"pow2_scale": True, "round_to_bf16": True}
