"""What would write past `model.load_weights` is refused, and told where it can't be seen."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from support.engine.commands import (
    begin,
    digests,
    end,
    model_of,
    status,
    update,
    update_from_disk,
)
from support.engine.models import MODELS, checkpoint
from support.engine.pool import engine_key, needs_sessions, on

from sglang_fp8rl.wire.refit_note import RefitNote

pytestmark = pytest.mark.engine

NEWER = "sglang.srt.model_executor.model_runner_components.weight_updater"
MODULE = NEWER if importlib.util.find_spec(NEWER) else "sglang.srt.model_executor.model_runner"
DIRECT = f"{MODULE}._model_load_weights_direct"
NORM, MATRIX = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"


@on(
    engine_key(
        "qwen3", "tp2", args=("--custom-weight-loader", DIRECT, "loader.of.mine"), label="loaders"
    )
)
@pytest.mark.parametrize("load_format", [DIRECT, "loader.of.mine", "direct", "upside_down"])
def test_a_loader_of_the_client_s_choice_is_refused_on_every_rank(host, load_format):
    """Also one that the server was started with: SGLang's own test names the function behind `direct`."""
    host.refuses_and_keeps(
        [(MATRIX, host.model.second[MATRIX])],
        f"load_format: {load_format!r}",
        "leave FP8 scales behind",
        "Leave load_format out",
        load_format=load_format,
    )


@on("qwen3-tp1")
def test_no_update_from_disk_puts_a_loader_before_the_model_s(host, checkpoint_dir):
    """Behind FlashRL's, SGLang before 0.5.23 casts all that comes later by itself, without our scales."""
    host.in_doubt = True
    path = str(checkpoint(checkpoint_dir, MODELS["qwen3"], "second"))
    before = host.call(digests)
    ok, message = host.call(update_from_disk, path, "flash_rl")
    assert not ok
    assert "load_format: 'flash_rl'" in message
    assert host.call(digests) == before
    host.update_to("second")
    assert host.call_all(digests) == host.fresh("second").digests


def update_that_loads_nothing(scheduler, tensors):
    model = model_of(scheduler)
    load_weights, model.load_weights = model.load_weights, lambda *_: None
    try:
        return update(scheduler, tensors)
    finally:
        model.load_weights = load_weights


@on("qwen3-tp1")
def test_a_request_that_loads_nothing_and_says_it_did_is_a_failed_one(host):
    ok, message = host.call(update_that_loads_nothing, [(NORM, host.model.second[NORM])])
    assert not ok
    assert "no call of model.load_weights" in message
    found = host.call(status)
    assert found["state"] == "failed"
    assert not found["consistent"]


def write_behind(scheduler, name):
    """As RDMA does: a new tensor, of which few codes differ."""
    parameter = dict(model_of(scheduler).named_parameters())[name].data
    codes = parameter.view(torch.uint8)
    codes ^= (torch.rand(codes.shape, generator=torch.Generator().manual_seed(0)) < 0.001).byte()


def move_words(scheduler, name):
    """Words of 8 bytes change places; no bit of them does."""
    parameter = dict(model_of(scheduler).named_parameters())[name].data
    words = parameter.view(torch.int64)
    words.copy_(words.flip(0))
    assert not torch.equal(words, words.flip(0))


@needs_sessions
@on("qwen3-tp1", "qwen3-tp2")
@pytest.mark.parametrize(("write", "name"), [(write_behind, MATRIX), (move_words, NORM)])
def test_what_is_written_in_a_session_past_every_call_is_told(host, write, name):
    assert all(ok for ok, _ in host.call_all(begin))
    host.call_all(write, name)
    answers = host.call_all(end)
    assert not answers[0][0]
    assert "nothing was loaded" in answers[0][1]
    assert all(rank["state"] == "failed" for rank in host.call_all(status))


@needs_sessions
@on("qwen3-tp1")
@pytest.mark.parametrize("partial", [False, True])
def test_an_announced_refit_in_which_nothing_comes_fails(host, partial):
    note = RefitNote("a", extent="partial" if partial else "all")
    assert host.call(begin, rid=note.to_text())[0]
    ok, message = host.call(end)
    assert not ok
    assert "nothing came in it" in message
    assert host.call(status)["state"] == "failed"


@on("qwen3-tp1", "qwen3-vl-tp1")
def test_weights_that_sglang_s_checker_resets_are_not_whole(host):
    """Behind a refit all is as loaded: also what no refit sends, such as the axes of a rotary table."""
    host.call(check_weights, "snapshot")
    host.call(check_weights, "reset_tensors")
    assert host.call(digests) != host.as_loaded.digests[0]
    found = host.call(status)
    assert found["state"] == "unloaded"
    assert not found["consistent"]
    host.update_to("first")
    assert host.call(status)["state"] == "whole"
    assert host.call_all(digests) == host.as_loaded.digests


def check_weights(scheduler, action):
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    with torch.no_grad():
        result = scheduler.weight_updater.check_weights(CheckWeightsReqInput(action=action))
    assert result.success, result.message
