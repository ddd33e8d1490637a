"""Memory that buckets are sent in: it is there until its sender lets go, and not a moment longer."""

from __future__ import annotations

import base64
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe, get_context, util
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import get_sharing_strategy

from sglang_fp8rl.engine.arrival.bucket import FlatBucket
from sglang_fp8rl.wire.bucket import Bucket
from sglang_fp8rl.wire.handles import serialize
from sglang_fp8rl.wire.staging import allocate

CPU = torch.device("cpu")


def file_of(tensor: torch.Tensor) -> Path:
    return Path("/dev/shm" + os.fsdecode(tensor.untyped_storage()._share_filename_cpu_()[1]))


@pytest.mark.parametrize("nbytes", [0, 1, 5000])
def test_a_file_goes_with_the_last_view_of_it(nbytes):
    memory = allocate(nbytes, CPU)
    file, view = file_of(memory), memory[: nbytes // 2]
    del memory
    assert file.exists()
    del view
    assert not file.exists()


def test_a_bucket_that_nobody_read_leaves_no_file():
    payload = Bucket.of([("w", torch.ones(100))]).payload(2, True)
    file = file_of(payload.content["flattened_tensor"])
    assert file.exists()
    del payload
    assert not file.exists()


@pytest.mark.parametrize("replicas", [1, 5])
def test_a_bucket_that_was_read_leaves_no_file(replicas):
    payload = Bucket.of([("w", torch.ones(100))]).payload(2, True)
    file = file_of(payload.content["flattened_tensor"])
    with get_context("spawn").Pool(1) as pool:
        assert pool.map(total_of, payload.texts * replicas) == [100] * 2 * replicas
    assert file.exists()  # whoever reads it, it is the sender's
    del payload
    assert not file.exists()


def total_of(text):
    flat = pickle.loads(base64.b64decode(text))["flattened_tensor"]
    return float(flat.view(torch.float32).sum())


def lets_go_of_a_deleted_file():
    memory = allocate(100, CPU)
    file_of(memory).unlink()
    del memory


def test_a_file_that_somebody_deleted_aborts_no_trainer():
    process = get_context("spawn").Process(target=lets_go_of_a_deleted_file)
    process.start()
    process.join()
    assert process.exitcode == 0


def ends_with_a_bucket(pipe):
    global held  # until the process ends
    held = allocate(100, CPU)
    pipe.send(file_of(held))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_ends_leaves_no_file(method):
    """A fork ends without `atexit`."""
    end, other = Pipe()
    process = get_context(method).Process(target=ends_with_a_bucket, args=(other,))
    process.start()
    process.join()
    assert not end.recv().exists()


def test_a_fork_that_ends_deletes_nothing():
    memory = allocate(100, CPU)
    file = file_of(memory)
    child = os.fork()
    if not child:
        util._run_finalizers(0)  # as at the end of any process
        os._exit(0)
    os.waitpid(child, 0)
    assert file.exists()


# As tensors may lie in a trainer; the first six are those of SGLang's pull request 39535.
LAYOUTS = {
    "contiguous": lambda x: x.reshape(4, 6),
    "strided vector": lambda x: x[::2],
    "strided matrix": lambda x: x.reshape(4, 6)[:, ::2],
    "transposed": lambda x: x.reshape(4, 6).t(),
    "scalar": lambda x: x[5],
    "empty": lambda x: x[:0].reshape(0, 3),
    "an expanded row": lambda x: x[3:7].expand(3, 4),
    "overlapping windows": lambda x: x.unfold(0, 5, 2),
    "columns of a fused buffer": lambda x: x.reshape(4, 6)[:, 3:],
    "from behind an odd offset": lambda x: x[1:].as_strided((3, 2), (5, 2)),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_layout_are_sent_as_their_values(dtype):
    numbers = torch.arange(24).remainder(2 if dtype is torch.bool else 24).to(dtype)
    weights = [(name, view(numbers)) for name, view in LAYOUTS.items()]
    expected = {name: (tuple(one.shape), one.float().tolist()) for name, one in weights}
    payload = Bucket.of(weights).payload(1, False)
    found = pickle.loads(base64.b64decode(payload.texts[0]))
    bucket = FlatBucket(found["flattened_tensor"], found["metadata"])
    assert all(one.is_contiguous() for _, one in bucket)
    assert all(one.dtype == dtype for _, one in bucket)
    assert {n: (tuple(one.shape), one.float().tolist()) for n, one in bucket} == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flat_bucket_has_the_bytes_of_each_tensor_row_by_row(dtype):
    numbers = torch.arange(24).remainder(2 if dtype is torch.bool else 24).to(dtype)
    weights = [(name, view(numbers)) for name, view in LAYOUTS.items()]
    filled = Bucket.of(weights)
    flat, metadata = filled.flat, filled.metadata
    for meta, (name, one) in zip(metadata, weights, strict=True):
        assert (meta.name, meta.shape, meta.dtype) == (name, one.shape, dtype)
        rows = one.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(flat[meta.start_idx : meta.end_idx], rows)


def test_memory_of_the_cpu_is_made_whatever_the_default_device():
    with torch.device("meta"):
        assert allocate(4, CPU).device == CPU


class NotesStrategy:
    """What takes so many seconds to pickle, and notes by which strategy torch shares memory at the end."""

    def __init__(self, seconds, noted):
        self.seconds, self.noted = seconds, noted

    def __reduce__(self):
        time.sleep(self.seconds)
        self.noted.append(get_sharing_strategy())
        return int, ()


def test_threads_that_serialize_at_once_do_not_change_each_other_s_strategy():
    before, noted = get_sharing_strategy(), []
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(serialize, [NotesStrategy(0.1, noted), NotesStrategy(0.3, noted)]))
    assert noted == ["file_system"] * 2
    assert get_sharing_strategy() == before
