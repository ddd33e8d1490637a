"""Buckets are sent in two buffers that take turns; none is overwritten while it may be read."""

from __future__ import annotations

import base64
import pickle
import time
from multiprocessing import get_context
from types import SimpleNamespace

import torch

from sglang_fp8rl.client.tensor_update import TensorUpdate
from sglang_fp8rl.wire import bucket as wire_bucket
from sglang_fp8rl.wire import layout_text
from sglang_fp8rl.wire.bucket import COUNT, StagingBuffers, flatten, payload_of
from sglang_fp8rl.wire.refit_note import RefitNote

CPU = torch.device("cpu")


def buckets(count, size=1000):
    return [[("w", torch.full((size,), float(number)))] for number in range(count)]


def test_buffers_take_turns():
    staging = StagingBuffers()
    one, two, three = (staging.take(nbytes, CPU) for nbytes in (100, 50, 80))
    assert one.data_ptr() != two.data_ptr()
    assert three.data_ptr() == one.data_ptr()
    assert [len(one), len(two), len(three)] == [100, 50, 80]


def test_buckets_of_about_one_size_fit_in_the_buffers_that_are_there(monkeypatch):
    made, allocate = [], wire_bucket.allocate
    monkeypatch.setattr(wire_bucket, "allocate", lambda n, on: made.append(n) or allocate(n, on))
    staging = StagingBuffers(least=1000)
    for size in (900, 400, 1000, 999, 1001):
        staging.take(size, CPU)
    assert made == [1000, 1000, 1001]


class SlowServer:
    """A connection to a server that reads what it is sent a while after it was asked to."""

    def __init__(self):
        self.received, self.handles = [], set()

    def get(self, path):
        section = {"flat_layout": layout_text.VERSION}
        return {"tp_size": 1, "internal_states": [{"fp8rl": section}]}

    def post_if_known(self, path, body):
        return False

    def post(self, path, body):
        (text,) = body["serialized_named_tensors"]
        payload = pickle.loads(base64.b64decode(text))
        assert payload["is_staged"]
        flat = payload["flattened_tensor"]
        self.handles.add(flat.untyped_storage()._share_filename_cpu_()[1])
        time.sleep(0.05)  # by then the sender has made the next bucket
        self.received.append(flat.view(torch.float32).clone())


def test_a_server_reads_what_was_sent_though_the_next_bucket_is_made_meanwhile():
    server = SlowServer()
    sent = [(f"w{number}", torch.full((1000,), float(number))) for number in range(6)]
    update = TensorUpdate(server, RefitNote("a"))
    update.send(iter(sent), 4000)
    for received, (_, tensor) in zip(server.received, sent, strict=True):
        assert torch.equal(received, tensor)
    assert len(server.handles) == COUNT


def test_each_rank_has_a_handle_of_its_own_to_open_and_close():
    """A file of shared memory counts who has it open; it goes when one more lets go than was told."""
    staging = StagingBuffers()
    with get_context("spawn").Pool(2, maxtasksperchild=None) as pool:
        for number, bucket in enumerate(buckets(3 * COUNT)):
            payload = payload_of(bucket, 2, True, staging)
            for text in payload.texts:
                assert pool.apply(_first_of, (text,)) == number


def _first_of(text):
    payload = pickle.loads(base64.b64decode(text))
    return float(payload["flattened_tensor"].view(torch.float32)[0])


def test_a_buffer_on_a_device_is_sent_when_it_is_filled(monkeypatch):
    """The receiver may have its handle open, and waits for the sender's stream only where it opens one."""
    done = []
    stream = SimpleNamespace(synchronize=lambda: done.append("filled"))
    module = SimpleNamespace(current_stream=lambda device: stream)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    staging = StagingBuffers()
    flatten([("a", torch.ones(4, device="meta"))], staging)
    assert done == ["filled"]
    flatten([("a", torch.ones(4, device="meta"))])  # a handle of its own: opened, so waited for
    flatten([("a", torch.ones(4))], staging)
    assert done == ["filled"]
