"""Buckets are sent in two buffers that take turns; none is overwritten while it may be read."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import time
from multiprocessing import Pipe, get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_fp8rl.client.tensor_update import TensorUpdate
from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.wire import layout_text
from sglang_fp8rl.wire import staging as wire_staging
from sglang_fp8rl.wire.bucket import flatten, payload_of
from sglang_fp8rl.wire.refit_note import RefitNote
from sglang_fp8rl.wire.staging import COUNT, OpenBuffers, StagingBuffers

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
    made, allocate = [], wire_staging.allocate
    monkeypatch.setattr(wire_staging, "allocate", lambda n, on: made.append(n) or allocate(n, on))
    staging = StagingBuffers(least=1000)
    for size in (900, 400, 1000, 999, 1001):
        staging.take(size, CPU)
    assert made == [1000, 1000, 1001]


class SlowServer:
    """A connection to a server that reads what it is sent a while after it was asked to."""

    def __init__(self):
        self.received, self.handles = [], []
        self.buffers = OpenBuffers()

    def server_info(self):
        section = {"flat_layout": layout_text.VERSION}
        return {"tp_size": 1, "internal_states": [{"fp8rl": section}]}

    def post_if_known(self, path, body):
        return False

    def post(self, path, body):
        (text,) = body["serialized_named_tensors"]
        payload = pickle.loads(base64.b64decode(text))
        self.handles += ["flattened_tensor" in payload]
        self.buffers.put_memory_into(payload)
        flat = payload["flattened_tensor"]
        time.sleep(0.05)  # by then the sender has made the next bucket
        self.received.append(flat.view(torch.float32).clone())


def test_a_server_reads_what_was_sent_though_the_next_bucket_is_made_meanwhile():
    server = SlowServer()
    sent = [(f"w{number}", torch.full((1000,), float(number))) for number in range(6)]
    update = TensorUpdate(server, RefitNote("a"))
    update.send(iter(sent), 4000)
    for received, (_, tensor) in zip(server.received, sent, strict=True):
        assert torch.equal(received, tensor)
    assert server.handles == [True] * COUNT + [False] * 4  # each is opened once


class Rank:
    """A process of a server that reads what it is sent."""

    def __init__(self):
        self.pipe, end = get_context("spawn").Pipe()
        self.process = get_context("spawn").Process(target=reads, args=(end,), daemon=True)
        self.process.start()

    def __call__(self, text):
        self.pipe.send(text)
        return self.pipe.recv()

    def close(self):
        self.pipe.send(None)
        self.process.join()


def reads(pipe):
    """First value and buffers open for each text; the files of shared memory that are mapped for "maps"."""
    open_buffers = OpenBuffers()
    if torch.cuda.is_available():  # as SGLang does before it reads
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
    while (text := pipe.recv()) is not None:
        if text == "maps":
            lines = Path("/proc/self/maps").read_text().splitlines()
            pipe.send(len({line.split()[-1] for line in lines if "/dev/shm/torch_" in line}))
        elif text == "close":
            pipe.send(open_buffers.close())
        else:
            payload = pickle.loads(base64.b64decode(text))
            try:
                open_buffers.put_memory_into(payload)
                first = float(payload["flattened_tensor"].view(torch.float32)[0])
                pipe.send((first, len(open_buffers)))
            except RefitError as error:
                pipe.send(str(error))
            payload = None


@pytest.fixture(scope="module")
def process():
    made = Rank()
    yield made
    made.close()


@pytest.fixture
def rank(process):
    yield process
    process("close")
    assert process("maps") == 0


def test_each_rank_has_a_handle_of_its_own_to_open_and_maps_memory_once(rank):
    """A file of shared memory counts who has it open; it goes when one more lets go than was told."""
    staging, other = StagingBuffers(), Rank()
    for number, bucket in enumerate(buckets(3 * COUNT)):
        payload = payload_of(bucket, 2, True, staging)
        found = [one(text) for one, text in zip((rank, other), payload.texts, strict=True)]
        assert found == [(number, min(number + 1, COUNT))] * 2
    assert rank("maps") == COUNT
    other.close()


@pytest.mark.gpu
def test_a_gpu_s_memory_is_back_when_both_have_let_go(rank):
    before, staging = torch.cuda.memory_allocated(), StagingBuffers()
    for number, bucket in enumerate(buckets(5)):
        payload = payload_of([(name, one.cuda()) for name, one in bucket], 1, True, staging)
        assert rank(payload.texts[0])[0] == number
    assert torch.cuda.memory_allocated() > before
    rank("close")
    del payload, staging
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before


def test_a_buffer_that_is_made_anew_has_another_name_and_the_old_one_goes(rank):
    """Its memory may be where the old one's was: by a name it could be taken for that."""
    staging, names = StagingBuffers(), set()
    for size in (10, 10, 1000, 1000, 5000, 20):
        bucket = [("w", torch.full((size,), float(size)))]
        payload = payload_of(bucket, 1, True, staging)
        names.add(payload.content["buffer"])
        first, count = rank(payload.texts[0])
        assert (first, count <= COUNT) == (size, True)
        del payload
    assert len(names) == 5
    assert rank("maps") <= COUNT


def test_a_new_sender_s_bucket_lets_go_of_the_last_one_s(rank):
    for number, bucket in enumerate(buckets(4)):
        payload = payload_of(bucket, 1, True, StagingBuffers())
        assert rank(payload.texts[0]) == (number, 1)
        assert rank("maps") == 1


def test_a_handle_that_comes_twice_is_refused(rank):
    staging = StagingBuffers()
    (text,) = payload_of(*buckets(1), 1, True, staging).texts
    assert rank(text) == (0, 1)
    said = rank(text)
    assert "its handle came before" in said
    assert "Send the update again" in said


def test_a_name_whose_handle_never_came_is_refused(rank):
    staging = StagingBuffers()
    sent = [payload_of(bucket, 1, True, staging).texts[0] for bucket in buckets(COUNT + 1)]
    assert "not open here" in rank(sent[-1])
    assert rank(sent[0]) == (COUNT, 1)  # the memory of the third bucket, whose name it has


@pytest.mark.parametrize("nbytes", [-1, 4001, 1.0, True, None])
def test_a_bucket_that_is_not_within_its_buffer_is_refused(nbytes):
    staging = StagingBuffers()
    content = payload_of(*buckets(1), 1, True, staging).content
    with pytest.raises(RefitError, match=r"bytes of 4000; a bucket lies in its buffer"):
        OpenBuffers().put_memory_into({**content, "nbytes": nbytes})


def test_memory_of_a_sender_that_died_is_let_go_of(rank):
    """Though no request comes any more."""
    sender = get_context("spawn").Process(target=_sends_and_waits, args=((ends := Pipe())[1],))
    sender.start()
    assert rank(ends[0].recv()) == (7, 1)
    os.kill(sender.pid, signal.SIGKILL)
    sender.join()
    deadline = time.monotonic() + 30
    while rank("maps") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rank("maps") == 0


def _sends_and_waits(pipe):
    payload = payload_of([("w", torch.full((1000,), 7.0))], 1, True, StagingBuffers())
    pipe.send(payload.texts[0])
    time.sleep(600)


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
