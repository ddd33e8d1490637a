"""Experts as one tensor and one by one are the same update, and the same checkpoint."""

from __future__ import annotations

import pytest
import torch
from support.engine.commands import begin, digests, end, status, update_from_disk
from support.engine.engine_host import EngineHost
from support.engine.pool import on
from support.fused_experts import with_fused_experts

from sglang_fp8rl.lab.testing.checkpoints import save_checkpoint
from sglang_fp8rl.versions import HAS_SESSIONS

pytestmark = pytest.mark.engine


def fused_path(directory, model, which):
    path = directory / f"{model.name}-{which}-fused"
    if not path.exists():
        save_checkpoint(path, model.config, with_fused_experts(getattr(model, which)))
    return path


on_all_kinds = on(
    "qwen3-moe-ep2", "deepseek-v3-tp1", slow=("qwen3-moe-tp1", "qwen2-moe-tp1", "glm4-moe-tp1")
)


@on_all_kinds
def test_a_checkpoint_of_fused_experts_is_loaded_as_one_of_single_ones(checkpoint_dir, host):
    path, layout = fused_path(checkpoint_dir, host.model, "first"), host.key.layout
    with EngineHost(path, tp_size=layout.tp_size, args=layout.args) as fused:
        assert fused.call_all(digests) == host.as_loaded.digests
        fused.send(list(with_fused_experts(host.model.second).items()))
        assert fused.call_all(digests) == host.fresh("second").digests


@on_all_kinds
def test_fused_and_single_experts_give_the_same_bytes(checkpoint_dir, host):
    model, expected = host.model, host.fresh("second").digests
    second = with_fused_experts(model.second)
    assert any(weight.dim() == 3 for weight in second.values())
    for _ in range(2):
        host.send(list(second.items()))
        assert host.call_all(digests) == expected
        assert host.call(status)["consistent"]
        host.send(list(model.first.items()))
        assert host.call_all(digests) == host.as_loaded.digests
    path = str(fused_path(checkpoint_dir, model, "second"))
    assert all(ok for ok, _ in host.call_all(update_from_disk, path))
    assert host.call_all(digests) == expected


@on("qwen3-moe-ep2")
def test_fused_experts_may_come_in_any_bucket_of_a_session(host):
    if HAS_SESSIONS:
        host.call_all(begin)
    for item in reversed(with_fused_experts(host.model.second).items()):
        host.send([item])
    if HAS_SESSIONS:
        assert all(ok for ok, _ in host.call_all(end))
    assert host.call_all(digests) == host.fresh("second").digests


@on("qwen3-moe-ep2")
def test_fused_experts_of_the_other_orientation_are_refused_and_nothing_is_stored(host):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    turned = with_fused_experts(host.model.second)[name].transpose(1, 2).contiguous()
    assert turned.shape[1] != turned.shape[2]
    host.refuses_and_keeps([(name, turned)], name, "(128, 512)")  # half of it, as an expert's gate


@on("mixtral-tp1")
def test_fused_experts_under_a_name_that_the_model_has_not_are_refused_by_name(host):
    """`transformers` calls Mixtral's block `mlp`, checkpoints and SGLang `block_sparse_moe`."""
    name = "model.layers.0.mlp.experts.down_proj"
    host.refuses([(name, torch.zeros(4, 256, 512))], name)
