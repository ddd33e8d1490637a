"""Buckets are sent in two buffers that take turns; none is overwritten while it may be read."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
import threading
import time
import weakref
from dataclasses import dataclass, field
from multiprocessing import Pipe, get_context
from pathlib import Path

import pytest
import torch

from sglang_fp8rl.client.tensor_update import TensorUpdate
from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.wire import layout_text
from sglang_fp8rl.wire import staging as wire_staging
from sglang_fp8rl.wire.bucket import Bucket, buckets_of
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
    assert [len(one), len(two), len(three)] == [100, 50, 100]


def test_a_buffer_that_has_to_be_larger_takes_the_place_of_the_last_one_alone():
    staging = StagingBuffers()
    first, second = staging.take(100, CPU), staging.take(100, CPU)
    larger = staging.take(200, CPU, is_larger=True)
    assert staging.take(100, CPU).data_ptr() == first.data_ptr()
    assert staging.take(200, CPU).data_ptr() == larger.data_ptr() != second.data_ptr()


def sizes_of(bucket):
    return len(bucket.flat), len(bucket.flat.untyped_storage())


def test_no_more_memory_is_shared_than_is_filled_where_nothing_is_known():
    weights = [(str(number), torch.zeros(300, dtype=torch.uint8)) for number in range(7)]
    assert [sizes_of(bucket) for bucket, _ in buckets_of(weights, 1000)] == [(908, 908)] * 2 + [
        (300, 300)
    ]


def test_a_buffer_that_will_be_filled_again_has_room_for_as_much_and_a_scale():
    weights = [(str(number), torch.zeros(300, dtype=torch.uint8)) for number in range(10)]
    found = [sizes_of(one) for one, _ in buckets_of(weights, 1000, staging=StagingBuffers())]
    assert found == [(908, 1031), (908, 1031), (908, 1031), (300, 1031)]


@pytest.mark.parametrize(("expected", "size"), [(900, 928), (5000, 1031), (500, 604), (200, 604)])
def test_an_update_that_is_as_large_as_the_last_one_fills_its_memory_at_once(expected, size):
    bucket = Bucket(1000, expected)
    for name in "ab":
        bucket.add(name, torch.ones(300, dtype=torch.uint8))
    bucket.close(is_last=True)
    assert len(bucket.flat.untyped_storage()) == size


@pytest.mark.parametrize(
    ("wanted", "size"), [(0, 10), (400, 412), (484, 499), (486, 10), (5000, 10)]
)
def test_more_is_allocated_where_as_much_is_left(monkeypatch, wanted, size):
    monkeypatch.setattr(wire_staging, "free_bytes", lambda device: 1000)
    assert len(wire_staging.allocate(10, CPU, wanted)) == size


@pytest.mark.parametrize("nbytes", [937, 1000])
def test_all_that_is_free_is_too_much(monkeypatch, nbytes):
    """A file has a header."""
    monkeypatch.setattr(wire_staging, "free_bytes", lambda device: 1000)
    with pytest.raises(RefitError, match=r"1000 bytes are free in /dev/shm"):
        wire_staging.allocate(nbytes, CPU)


@pytest.mark.parametrize("expected", [0, 100, 137, 700, 1 << 20])
@pytest.mark.parametrize("staging", [None, StagingBuffers()])
def test_tensors_lie_where_the_layout_says_whatever_was_expected(expected, staging):
    dtypes = (torch.float32, torch.uint8, torch.bfloat16)
    for seed in range(2 * COUNT):
        weights = {f"{n}": torch.full((n % 5, 7), n + seed).to(dtypes[n % 3]) for n in range(11)}
        weights["of no dimension"] = torch.tensor(float(seed))
        kept = {name: one.clone() for name, one in weights.items()}
        bucket = Bucket(1 << 20, expected, staging)
        for name, one in weights.items():
            bucket.add(name, one)
            one.zero_()
        bucket.close(is_last=False)
        found = dict(map(bucket.tensor, range(len(weights))))
        assert list(found) == list(kept)
        assert all(torch.equal(found[name], kept[name]) for name in kept)
        assert {one.dtype for one in found.values()} == set(dtypes)


def test_a_scale_stays_with_its_weight_whatever_the_limit():
    sent = [(f"{n}.weight{end}", torch.ones(100)) for n in range(3) for end in ("", "_scale_inv")]
    names = [[one.name for one in bucket.metadata] for bucket, _ in buckets_of(sent, 0)]
    assert names == [[f"{n}.weight", f"{n}.weight_scale_inv"] for n in range(3)]


def test_memory_that_was_too_small_goes_when_larger_one_is_filled():
    bucket = Bucket(1000, 300)
    bucket.add("a", torch.ones(300, dtype=torch.uint8))
    small = weakref.ref(bucket._memory.untyped_storage())
    bucket.add("b", torch.ones(300, dtype=torch.uint8))
    bucket.close(is_last=True)
    assert small() is None
    assert len(bucket.flat) == 604
    assert bucket.flat[304:].all()


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


def test_a_bucket_that_outgrows_its_buffer_writes_into_none_that_is_being_read():
    server, sent = SlowServer(), []
    for number in range(8):
        sent.append((f"{number}.weight", torch.full((1000,), float(number))))
        if number >= 3:  # when the buffers are there, with room for a weight alone
            sent.append((f"{number}.weight_scale_inv", torch.full((100,), float(number))))
    TensorUpdate(server, RefitNote("a")).send(iter(sent), 4000)
    assert [one.unique().tolist() for one in server.received] == [[n] for n in range(8)]


@pytest.mark.parametrize("limit", [4000, 12000, 1 << 20])
def test_an_iterator_may_use_one_memory_for_all_its_tensors(limit):
    """As one does that gathers into a buffer of its own, or reads a file into it."""
    server, memory = SlowServer(), torch.empty(1000)

    def reused():
        for number in range(7):
            yield f"w{number}", memory.fill_(number)
        memory.fill_(99)

    update = TensorUpdate(server, RefitNote("a"))
    update.send(reused(), limit)
    assert torch.cat(server.received).view(7, 1000)[:, 0].tolist() == list(range(7))
    assert update.buckets == -(-7 * 4000 // min(limit, 28000))


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
        payload = Bucket.of(bucket, staging).payload(2, True)
        found = [one(text) for one, text in zip((rank, other), payload.texts, strict=True)]
        assert found == [(number, min(number + 1, COUNT))] * 2
    assert rank("maps") == COUNT
    other.close()


@pytest.mark.gpu
def test_a_gpu_s_memory_is_back_when_both_have_let_go(rank):
    before, staging = torch.cuda.memory_allocated(), StagingBuffers()
    for number, bucket in enumerate(buckets(5)):
        payload = Bucket.of([(name, one.cuda()) for name, one in bucket], staging).payload(1, True)
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
        payload = Bucket.of(bucket, staging).payload(1, True)
        names.add(payload.content["buffer"])
        first, count = rank(payload.texts[0])
        assert (first, count <= COUNT) == (size, True)
        del payload
    assert len(names) == 5
    assert rank("maps") <= COUNT


def test_a_new_sender_s_bucket_lets_go_of_the_last_one_s(rank):
    for number, bucket in enumerate(buckets(4)):
        payload = Bucket.of(bucket, StagingBuffers()).payload(1, True)
        assert rank(payload.texts[0]) == (number, 1)
        assert rank("maps") == 1


def test_a_handle_that_comes_twice_is_refused(rank):
    staging = StagingBuffers()
    (text,) = Bucket.of(*buckets(1), staging).payload(1, True).texts
    assert rank(text) == (0, 1)
    said = rank(text)
    assert "its handle came before" in said
    assert "Send the update again" in said


def test_a_name_whose_handle_never_came_is_refused(rank):
    staging = StagingBuffers()
    sent = [Bucket.of(bucket, staging).payload(1, True).texts[0] for bucket in buckets(COUNT + 1)]
    assert "not open here" in rank(sent[-1])
    assert rank(sent[0]) == (COUNT, 1)  # the memory of the third bucket, whose name it has


@pytest.mark.parametrize("nbytes", [-1, 4001, 1.0, True, None])
def test_a_bucket_that_is_not_within_its_buffer_is_refused(nbytes):
    staging = StagingBuffers()
    content = Bucket.of(*buckets(1), staging).payload(1, True).content
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
    payload = Bucket.of([("w", torch.full((1000,), 7.0))], StagingBuffers()).payload(1, True)
    pipe.send(payload.texts[0])
    time.sleep(600)


def test_senders_that_take_turns_leave_one_thread_and_one_descriptor_each():
    """A server waits for the end of each; with those that it waits for it runs for weeks."""

    def counts():
        files = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
        return threading.active_count(), sum("pidfd" in one for one in files)

    senders = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2)]
    server, before = OpenBuffers(), counts()
    for turn in range(20):
        owner = wire_staging._process(senders[turn % 2].pid)
        content = Bucket.of(*buckets(1), StagingBuffers()).payload(1, True).content
        server.put_memory_into({**content, "owner": owner})
        server.close()
    grown = [now - then for now, then in zip(counts(), before, strict=True)]
    for sender in senders:
        sender.communicate()
    assert max(grown) <= len(senders), grown


class Streams:
    """Of a device that has none: which one is the current one, and what was asked of each."""

    def __init__(self, monkeypatch):
        self.asked, self.current = [], "a"
        monkeypatch.setattr(torch, "get_device_module", lambda device: self)

    def current_stream(self, device):
        return Stream(self.current, self.asked)


@dataclass
class Stream:
    name: str
    asked: list = field(compare=False)

    def synchronize(self):
        self.asked.append(f"{self.name} is done")

    def wait_stream(self, other):
        self.asked.append(f"{self.name} behind {other.name}")


@pytest.mark.parametrize("staging", [None, StagingBuffers()])
def test_a_bucket_on_a_device_is_sent_when_it_is_filled(monkeypatch, staging):
    """The receiver may have its handle open, and waits for the sender's stream only where it opens one."""
    streams = Streams(monkeypatch)
    bucket = Bucket(1000, staging=staging)
    bucket.add("a", torch.ones(4, device="meta"))
    assert not streams.asked
    bucket.close(is_last=True)
    assert bucket.flat.is_meta
    assert streams.asked == ["a is done"]
    assert not Bucket.of([("a", torch.ones(4))]).flat.is_meta
    assert streams.asked == ["a is done"]


@pytest.mark.parametrize("expected", [0, 1000])
def test_what_is_copied_on_another_stream_is_copied_behind_it(monkeypatch, expected):
    """The current stream of who consumes an iterator may be one that the iterator has set."""
    streams, bucket = Streams(monkeypatch), Bucket(1000, expected)
    for streams.current in "abba":
        bucket.add(streams.current, torch.ones(4, device="meta"))
    assert streams.asked == ["b behind a", "a behind b"]
    streams.current = "c"
    bucket.close(is_last=True)
    assert streams.asked[2:] == ["c behind a", "c is done"]
