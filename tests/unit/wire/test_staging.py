"""Buckets are sent in two buffers that take turns; none is overwritten while it may be read."""

from __future__ import annotations

import base64
import pickle
import time
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch

from sglang_fp8rl.client.connection import PipelinedSender
from sglang_fp8rl.wire.bucket import allocate, flatten, payload_of
from sglang_fp8rl.wire.staging import COUNT, StagingBuffers

CPU = torch.device("cpu")


def buckets(count, size=1000):
    return [[("w", torch.full((size,), float(number)))] for number in range(count)]


def test_buffers_take_turns_and_none_is_given_away_twice():
    staging = StagingBuffers(allocate)
    one, two = staging.take(100, CPU), staging.take(50, CPU)
    assert one.memory.data_ptr() != two.memory.data_ptr()
    with pytest.raises(RuntimeError, match="wait for an answer"):
        staging.take(1, CPU)
    one.end()
    three = staging.take(80, CPU)
    assert three.memory.data_ptr() == one.memory.data_ptr()
    with pytest.raises(RuntimeError, match="wait for an answer"):
        staging.take(1, CPU)


def test_buckets_of_about_one_size_fit_in_the_buffers_that_are_there():
    made = []
    staging = StagingBuffers(lambda n, device: made.append(n) or allocate(n, device), least=1000)
    for size in (900, 400, 1000, 999, 1001):
        staging.take(size, CPU).end()
    assert made == [1000, 1000, 1001]


class SlowServer:
    """Reads what it is sent a while after it was asked to."""

    def __init__(self):
        self.received, self.handles = [], set()

    def __call__(self, body):
        payload = pickle.loads(base64.b64decode(body["text"]))
        assert payload["is_staged"]
        flat = payload["flattened_tensor"]
        self.handles.add(flat.untyped_storage()._share_filename_cpu_()[1])
        time.sleep(0.05)  # by then the sender has made the next bucket
        self.received.append(flat.view(torch.float32).clone())


def test_a_server_reads_what_was_sent_though_the_next_bucket_is_made_meanwhile():
    server, staging, sent = SlowServer(), StagingBuffers(allocate), buckets(6)
    with PipelinedSender(server, None) as sender:
        for bucket in sent:
            payload = payload_of(bucket, "flattened_bucket", 1, True, staging)
            sender.send({"text": payload.texts[0]}, payload, 1, 0)
        sender.finish()
    for received, ((_, tensor),) in zip(server.received, sent, strict=True):
        assert torch.equal(received, tensor)
    assert len(server.handles) == COUNT


def test_each_rank_has_a_handle_of_its_own_to_open_and_close():
    """A file of shared memory counts who has it open; it goes when one more lets go than was told."""
    staging = StagingBuffers(allocate)
    with get_context("spawn").Pool(2, maxtasksperchild=None) as pool:
        for number, bucket in enumerate(buckets(3 * COUNT)):
            payload = payload_of(bucket, "flattened_bucket", 2, True, staging)
            for text in payload.texts:
                assert pool.apply(_first_of, (text,)) == number
            payload.lease.end()


def _first_of(text):
    payload = pickle.loads(base64.b64decode(text))
    return float(payload["flattened_tensor"].view(torch.float32)[0])


def test_a_buffer_on_a_device_is_sent_when_it_is_filled(monkeypatch):
    """The receiver keeps handles open, and waits for the sender's stream only where it opens one."""
    done = []
    stream = SimpleNamespace(synchronize=lambda: done.append("filled"))
    module = SimpleNamespace(current_stream=lambda device: stream)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    staging = StagingBuffers(allocate)
    _, _, lease = flatten([("a", torch.ones(4, device="meta"))], staging)
    assert done == ["filled"]
    lease.end()
    flatten([("a", torch.ones(4, device="meta"))])  # a handle of its own: opened, so waited for
    flatten([("a", torch.ones(4))], staging)
    assert done == ["filled"]
