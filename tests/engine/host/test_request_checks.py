"""What an update request may not ask for, and memory that is not what it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.by_definition import quantize_blockwise
from support.engine.commands import begin, digests, send, status, update
from support.engine.forked import CONTEXT
from support.engine.models import MODELS
from support.engine.pool import on

from sglang_fp8rl.wire.bucket import serialize
from sglang_fp8rl.wire.refit_note import RefitNote

pytestmark = [pytest.mark.engine, on("qwen3-tp1")]

MODEL = MODELS["qwen3"]
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def _nothing_is_stored_and_a_full_update_clears_everything(host):
    before = host.call(digests)
    yield
    assert host.call(digests) == before
    assert host.call(update, list(MODEL.first.items()))[0]
    assert host.call(status)["state"] == "whole"


def refused(host, answer, *words):
    success, message = answer
    assert not success
    assert all(word in message for word in words), message
    assert host.call(status)["state"] == "failed"


@pytest.mark.parametrize("count", [0, 3])
def test_there_is_one_payload_for_each_rank(host, count):
    payload = serialize([(DOWN, MODEL.second[DOWN])])
    refused(host, host.call(send, [payload] * count), f"{count} payload(s)", "each of the 1")


def _knows_drafts(scheduler):
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    return "selector" in UpdateWeightsFromTensorReqInput.__struct_fields__


def test_a_draft_that_is_not_there_is_not_updated_in_silence(host):
    if not host.call(_knows_drafts):
        pytest.skip("this SGLang updates the draft with the model")
    answer = host.call(update, [(DOWN, MODEL.second[DOWN])], selector="draft")
    refused(host, answer, "selector", "no draft model")
    success, message = host.call(begin, selector="draft")
    assert not success
    assert "no draft model" in message


def test_shared_memory_that_was_cut_is_refused_before_it_is_read(host):
    tensor = MODEL.second[DOWN].clone()
    payload = serialize([(DOWN, tensor)])
    _, handle, _ = tensor.untyped_storage()._share_filename_cpu_()
    file = Path("/dev/shm") / os.fsdecode(handle).lstrip("/")
    os.truncate(file, os.sysconf("SC_PAGE_SIZE"))
    refused(host, host.call(send, [payload]), file.name, "bytes", "served as zeros")


def _sockets(scheduler):
    links = (os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists())
    return sum(link.startswith("socket:") for link in links)


def _short_lived_trainer(pipe, weight):
    pipe.send(serialize([(DOWN, torch.from_numpy(weight))]))
    pipe.recv()


def test_senders_leave_no_socket_behind(host):
    found = []
    for _ in range(3):
        ours, theirs = CONTEXT.Pipe()
        args = (theirs, MODEL.first[DOWN].numpy())
        process = CONTEXT.Process(target=_short_lived_trainer, args=args)
        process.start()
        assert host.call(send, [ours.recv()])[0]
        ours.send(None)
        process.join()
        found.append(host.call(_sockets))
    assert found == found[:1] * 3


@pytest.mark.parametrize("named", [False, True])
def test_halves_of_two_senders_never_meet(host, named):
    """The codes come from the engine's own process, the scale from this one, which names its refit or does not."""
    codes, _ = quantize_blockwise(MODEL.second[DOWN])
    _, scale = quantize_blockwise(MODEL.second[DOWN] * 3)
    first = host.call(update, [(DOWN, codes)], None, False)
    refused(host, first, "FP8 without its scale")
    payload = serialize([(f"{DOWN}_scale_inv", scale)])
    rid = RefitNote("theirs").to_text() if named else None
    refused(host, host.call(send, [payload], rid=rid), "without its FP8 weight")
