"""What an update request may not ask for, and memory that is not what it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.by_definition import quantize_blockwise
from support.engine.commands import begin, digests, send
from support.engine.forked import CONTEXT
from support.engine.models import MODELS
from support.engine.pool import needs_sessions, on

from sglang_fp8rl.wire.handles import serialize
from sglang_fp8rl.wire.refit_note import RefitNote

pytestmark = [pytest.mark.engine, on("qwen3-tp1")]

MODEL = MODELS["qwen3"]
DOWN = "model.layers.0.mlp.down_proj.weight"


def refused(host, payload, *words, **more):
    success, message = host.call(send, [payload], **more)
    assert not success
    assert all(word in message for word in words), message
    assert host.call(digests) == host.as_loaded.digests[0]


@needs_sessions
def test_no_session_is_opened_for_a_draft_that_is_not_there(host):
    success, message = host.call(begin, selector="draft")
    assert not success
    assert "no draft model" in message


def test_shared_memory_that_was_cut_is_refused_before_it_is_read(host):
    tensor = MODEL.second[DOWN].clone()
    payload = serialize([(DOWN, tensor)])
    _, handle, _ = tensor.untyped_storage()._share_filename_cpu_()
    file = Path("/dev/shm") / os.fsdecode(handle).lstrip("/")
    os.truncate(file, os.sysconf("SC_PAGE_SIZE"))
    refused(host, payload, file.name, "bytes", "served as zeros")


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
    host.refuses_and_keeps([(DOWN, codes)], "FP8 without its scale", flush_cache=False)
    payload = serialize([(f"{DOWN}_scale_inv", scale)])
    rid = RefitNote("theirs").to_text() if named else None
    refused(host, payload, "without its FP8 weight", rid=rid)
