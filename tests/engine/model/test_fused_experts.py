"""Experts as one tensor and one by one are the same update, and the same checkpoint."""

from __future__ import annotations

import pytest
import torch
from commands import begin, digests, end, status, update, update_from_disk
from contract import HOST, LAYOUTS
from engine_host import EngineHost
from models import MODELS, checkpoint
from packaging.version import Version

from sglang_fp8rl.testing.checkpoints import save_checkpoint, with_fused_experts

pytestmark = pytest.mark.engine

CASES = [
    ("qwen3-moe", "tp1"),
    ("qwen3-moe", "ep2"),
    ("qwen2-moe", "tp1"),
    ("glm4-moe", "tp1"),
    ("deepseek-v3", "tp1"),
]


def fused_path(directory, model, which):
    path = directory / f"{model.name}-{which}-fused"
    if not path.exists():
        save_checkpoint(path, model.config, with_fused_experts(getattr(model, which)))
    return path


def start(path, layout):
    return EngineHost(path, tp_size=layout.tp_size, args=layout.args)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_fused_and_single_experts_give_the_same_bytes(checkpoint_dir, name, layout):
    model, layout = MODELS[name], LAYOUTS[layout]
    second = with_fused_experts(model.second)
    assert any(weight.dim() == 3 for weight in second.values())
    with start(checkpoint(checkpoint_dir, model, "second"), layout) as fresh:
        expected = fresh.call_all(digests)
    with start(fused_path(checkpoint_dir, model, "first"), layout) as host:
        first = host.call_all(digests)
        assert all(ok for ok, _ in host.call_all(update, list(model.first.items())))
        assert host.call_all(digests) == first  # a fused checkpoint is the same as a single one
        for _ in range(2):
            answers = host.call_all(update, list(second.items()))
            assert all(ok for ok, _ in answers), answers
            assert host.call_all(digests) == expected
            assert host.call(status)["consistent"]
            assert all(ok for ok, _ in host.call_all(update, list(model.first.items())))
            assert host.call_all(digests) == first
        path = str(fused_path(checkpoint_dir, model, "second"))
        assert all(ok for ok, _ in host.call_all(update_from_disk, path))
        assert host.call_all(digests) == expected


def test_fused_experts_may_come_in_any_bucket_of_a_session(checkpoint_dir):
    model = MODELS["qwen3-moe"]
    with EngineHost(checkpoint(checkpoint_dir, model, "second")) as fresh:
        expected = fresh.call_all(digests)
    with EngineHost(checkpoint(checkpoint_dir, model, "first")) as host:
        if Version("0.5.21") <= HOST:
            host.call(begin)
        for item in reversed(with_fused_experts(model.second).items()):
            ok, message = host.call(update, [item])
            assert ok, message
        if Version("0.5.21") <= HOST:
            assert host.call(end)[0]
        assert host.call_all(digests) == expected


def test_fused_experts_of_the_other_orientation_are_refused_and_nothing_is_stored(checkpoint_dir):
    model = MODELS["qwen3-moe"]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    turned = with_fused_experts(model.second)[name].transpose(1, 2).contiguous()
    assert turned.shape[1] != turned.shape[2]
    with EngineHost(checkpoint(checkpoint_dir, model, "first")) as host:
        before = host.call_all(digests)
        ok, message = host.call(update, [(name, turned)])
        assert not ok
        assert name in message
        assert "(128, 512)" in message  # half of it, as an expert's gate
        assert host.call_all(digests) == before


def test_fused_experts_under_a_name_that_the_model_has_not_are_refused_by_name(checkpoint_dir):
    """`transformers` calls Mixtral's block `mlp`, checkpoints and SGLang `block_sparse_moe`."""
    name = "model.layers.0.mlp.experts.down_proj"
    with EngineHost(checkpoint(checkpoint_dir, MODELS["mixtral"], "first")) as host:
        ok, message = host.call(update, [(name, torch.zeros(4, 256, 512))])
        assert not ok
        assert name in message
