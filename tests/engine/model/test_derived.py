"""What SGLang derives from `kv_b_proj` (MLA) follows every update, in place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version
from support.by_definition import quantize_blockwise
from support.engine.commands import addresses, begin, digests, end, model_of, parameter
from support.engine.contract import HOST
from support.engine.models import MODELS, checkpoint
from support.engine.options import log_of_a_failed_start
from support.engine.pool import needs_sessions, on

from sglang_fp8rl.versions import HAS_SESSIONS

pytestmark = pytest.mark.engine

ATTENTION = "model.layers.1.self_attn"
# No multiple of a block in kv_b_proj's columns; refused before anything is loaded.
ODD = '{"kv_lora_rank": 96}'
KV_B = f"{ATTENTION}.kv_b_proj.weight"


# Blocks on one rank, which the CPU platform runs in full.
on_blocks = on("deepseek-v3-tp1")


def derive_again(scheduler):
    """SGLang's own derivation from the bytes that are served; changes nothing if nothing is stale."""
    model_of(scheduler).post_load_weights()


@on_blocks
def test_a_bucket_with_only_kv_b_proj_brings_its_derived_weights_along(host):
    fresh_second = host.fresh("second").digests[0]
    before = host.call(digests)
    host.send([(KV_B, host.model.second[KV_B])])
    after = host.call(digests)
    for leaf in ("kv_b_proj.weight", "w_kc", "w_vc"):
        assert after[f"{ATTENTION}.{leaf}"] == fresh_second[f"{ATTENTION}.{leaf}"]
        assert after[f"{ATTENTION}.{leaf}"] != before[f"{ATTENTION}.{leaf}"]
    assert after["model.layers.0.self_attn.w_kc"] == before["model.layers.0.self_attn.w_kc"]


@on_blocks
def test_derived_weights_are_of_the_served_bytes_after_a_failed_update(host):
    second = host.model.second
    bad = f"{ATTENTION}.o_proj.weight"
    norm = "model.norm.weight"
    if HAS_SESSIONS:
        host.call(begin)
    host.refuses([(KV_B, second[KV_B]), (bad, second[bad][:, :-1])], bad)
    # After a call that succeeds, SGLang derives nothing at the end of the session.
    host.send([(norm, second[norm])])
    if HAS_SESSIONS:
        host.call(end)
    found = host.call(digests)
    host.call(derive_again)
    assert host.call(digests) == found


@pytest.mark.skipif(Version("0.5.23") > HOST, reason="per channel it is refused there")
@on("deepseek-misaligned-tp2")
def test_derived_tensors_keep_their_addresses_though_sglang_binds_new_ones(host):
    """Per channel, SGLang derives `w_scale` too, and makes a new tensor of it each time."""
    before = host.call_all(addresses)
    values = host.call_all(digests)
    for _ in range(2):
        host.send([(KV_B, host.model.second[KV_B])])
    assert host.call_all(addresses) == before
    name = f"{ATTENTION}.w_scale"
    assert any(
        new[name] != old[name] for new, old in zip(host.call_all(digests), values, strict=True)
    )


@pytest.mark.skipif(Version("0.5.23") <= HOST, reason="newer ones can")
def test_a_host_that_derives_from_blocks_only_refuses_row_scales(checkpoint_dir, tmp_path):
    path = checkpoint(checkpoint_dir, MODELS["deepseek-misaligned"], "first")
    log = log_of_a_failed_start(path, tmp_path / "log", ("--json-model-override-args", ODD))
    assert "kv_b_proj" in log
    assert "derives w_kc and w_vc from blocks only" in log


@on_blocks
def test_either_part_of_the_fused_projection_may_come_alone(host):
    """SGLang keeps the first part until the second comes, and forgets it at the end of the call."""
    second = host.model.second
    name = f"{ATTENTION}.fused_qkv_a_proj_with_mqa.weight"
    old = host.call(parameter, name)
    expected = old.clone()
    for part, rows in (("kv_a_proj_with_mqa", slice(256, None)), ("q_a_proj", slice(0, 256))):
        key = f"{ATTENTION}.{part}.weight"
        codes, _ = quantize_blockwise(second[key])
        host.send([(key, second[key])])
        expected[rows] = codes.view(torch.uint8)
        assert torch.equal(host.call(parameter, name), expected), part
    assert not torch.equal(old, expected)


@on_blocks
def test_a_part_of_the_wrong_shape_is_refused_by_name(host):
    key = f"{ATTENTION}.q_a_proj.weight"
    host.refuses_and_keeps([(key, torch.zeros(448, 256))], key, "(256, 256)")


@needs_sessions
@on("qwen3-tp1")
def test_what_a_method_makes_at_the_end_of_a_session_is_no_change_by_a_forward_pass(host):
    """SGLang's hpc_ops pads the scales of experts there."""
    host.call(pad_scales)
    assert host.call(begin)[0]
    host.update_to("second")
    assert host.call(end)[0]
    host.call(run_a_pass)
    host.update_to("first")
    host.call(leave_scales)


def pad_scales(scheduler):
    """As on a server on which nothing has run."""
    model = model_of(scheduler)
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    native = layer.quant_method.process_weights_after_loading

    def process(layer):
        native(layer)
        layer.padded = torch.nn.functional.pad(layer.weight_scale_inv.data, (0, 3))

    process(layer)
    layer.quant_method.process_weights_after_loading = process
    refit = model.fp8rl_refit
    scheduler.test_runner, refit.runner = refit.runner, SimpleNamespace(forward_pass_id=0)
    scheduler.test_copies = refit.derived.kept_copies
    refit.derived.note_loaded(refit.written_targets())


def run_a_pass(scheduler):
    model_of(scheduler).fp8rl_refit.runner.forward_pass_id = 1


def leave_scales(scheduler):
    model = model_of(scheduler)
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    del layer.quant_method.process_weights_after_loading, layer.padded
    model.fp8rl_refit.runner = scheduler.test_runner
    model.fp8rl_refit.derived.kept_copies = scheduler.test_copies
