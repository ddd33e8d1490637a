"""Tensors of another process are mapped whole, and no file is deleted that its sender still counts on."""

from __future__ import annotations

import base64
import contextlib
import gc
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from support.engine.forked import CONTEXT
from torch.multiprocessing import reductions

from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.lab.cpu_platform.shared_memory import check_shared_memory
from sglang_fp8rl.wire.handles import serialize

HEADER = 64


@contextlib.contextmanager
def checked_shared_memory():
    with pytest.MonkeyPatch.context() as patched:
        for name in ("rebuild_storage_filename", "rebuild_storage_fd"):
            patched.setattr(reductions, name, getattr(reductions, name))
        check_shared_memory()
        yield


@pytest.fixture(autouse=True)
def as_another_process(monkeypatch):
    """torch hands a process its own storage back; here all is read as if somebody else had sent it."""
    monkeypatch.setattr(reductions, "shared_cache", reductions.SharedCache())


def sent(tensor: torch.Tensor) -> tuple[bytes, Path]:
    """Its pickle, and its file."""
    content = base64.b64decode(serialize(tensor))
    handle = tensor.untyped_storage()._share_filename_cpu_()[1]
    reductions.shared_cache.clear()
    return content, Path("/dev/shm" + handle.decode())


def read(content: bytes) -> torch.Tensor:
    with checked_shared_memory():
        return pickle.loads(content)


def readers(file: Path) -> int:
    return struct.unpack("=i", file.read_bytes()[:4])[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(3, 5), (), (1,), (0, 4), (129, 257)])
def test_what_is_read_is_what_was_sent(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    content, _ = sent(tensor)
    found = read(content)
    assert found.dtype == dtype
    assert (
        torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)) if shape else found == tensor
    )


def test_views_keep_their_strides_and_offsets():
    whole = torch.arange(48.0).reshape(6, 8)
    content, _ = sent(whole)
    part = base64.b64decode(serialize([whole[1:4, 2:7].t(), whole[5]]))
    first, second = read(part)
    assert torch.equal(first, whole[1:4, 2:7].t())
    assert first.stride() == (1, 8)
    assert torch.equal(second, whole[5])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert read(content).untyped_storage().data_ptr() == first.untyped_storage().data_ptr()


def test_a_typed_storage_is_read_too():
    storage = torch.arange(7, dtype=torch.int16).storage()
    metadata = storage._share_filename_cpu_()
    storage._shared_incref()
    with checked_shared_memory():
        found = reductions.rebuild_storage_filename(torch.TypedStorage, *metadata, torch.int16)
    assert found.tolist() == list(range(7))


def test_a_thousand_tensors_keep_no_descriptor_open():
    sent_tensors = [torch.full((3,), float(at)) for at in range(1000)]
    content = base64.b64decode(serialize(sent_tensors))
    reductions.shared_cache.clear()
    gc.collect()  # what other tests left open closes now, not in between
    before = len(os.listdir("/proc/self/fd"))
    found = read(content)
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(map(torch.equal, found, sent_tensors))


def by_torch(pipe, content):
    found = pickle.loads(content)
    pipe.send(float(found.sum()))


def test_readers_are_counted_as_torch_counts_them():
    tensor = torch.ones(100)
    content, file = sent(tensor)
    more, _ = sent(tensor)
    assert readers(file) == 3  # the sender, and two that it was sent to
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=by_torch, args=(theirs, content))
    process.start()
    assert ours.recv() == 100
    process.join()
    assert readers(file) == 2
    found = read(more)
    assert readers(file) == 1
    del found
    assert readers(file) == 1


def lets_go_at_once(pipe):
    tensor = torch.full((1000,), 3.0)
    pickles = [sent(tensor) for _ in range(2)]
    del tensor
    pipe.send(pickles)
    pipe.recv()


def test_the_last_reader_of_a_sender_that_let_go_deletes_the_file():
    ours, theirs = CONTEXT.Pipe()
    sender = CONTEXT.Process(target=lets_go_at_once, args=(theirs,))
    sender.start()
    (content, file), (more, _) = ours.recv()
    assert readers(file) == 2
    first = read(content)
    assert file.exists()
    second = read(more)
    assert not file.exists()
    assert first.sum() == second.sum() == 3000
    ours.send("enough")
    sender.join()
    assert sender.exitcode == 0


def test_replicas_that_read_one_handle_never_delete_their_sender_s_file():
    tensor = torch.full((1000,), 3.0)
    for value in (3.0, 4.0):  # a second update in the same memory
        tensor.fill_(value)
        content, file = sent(tensor)
        for _ in range(3):
            reductions.shared_cache.clear()
            assert read(content).sum() == 1000 * value
        assert readers(file) == 1
    del tensor
    assert not file.exists()


@pytest.mark.parametrize("missing", [1, HEADER, HEADER + 1, 4000, 4000 + HEADER])
def test_a_file_that_is_a_byte_too_short_is_refused(missing):
    content, file = sent(torch.ones(1000))
    os.truncate(file, 4000 + HEADER - missing)
    with pytest.raises(RefitError, match="served as zeros"):
        read(content)
    assert file.stat().st_size == 4000 + HEADER - missing  # torch makes it longer


def test_a_file_that_is_gone_is_refused():
    content, file = sent(torch.ones(10))
    renamed = content.replace(file.name.encode(), file.name[:-2].encode() + b"zz")
    with pytest.raises(RefitError, match="not there"):
        read(renamed)
    assert readers(file) == 1


@pytest.mark.parametrize(
    "name", [b"/../../etc/passwd", b"/etc/passwd", b"/torch_/../x", b"/sem.x", b""]
)
def test_only_files_that_torch_made_are_opened(name):
    with checked_shared_memory(), pytest.raises(RefitError, match="not a file that torch made"):
        reductions.rebuild_storage_filename(torch.UntypedStorage, b"", name, 8)


def test_a_link_is_not_followed(tmp_path):
    target = tmp_path / "secret"
    target.write_bytes(bytes(200))
    link = Path("/dev/shm/torch_link_of_a_test")
    link.symlink_to(target)
    try:
        with checked_shared_memory(), pytest.raises(RefitError, match="can't be opened"):
            reductions.rebuild_storage_filename(
                torch.UntypedStorage, b"", b"/" + os.fsencode(link.name), 8
            )
    finally:
        link.unlink()
    assert target.read_bytes() == bytes(200)


def a_reader(pipe, content):
    found = read(content)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    pipe.send((float(found.sum()), children))


def a_sender(pipe):
    """Sends a weight, and lets go of it after its reader has ended."""
    weight = torch.ones(5000)
    pipe.send(base64.b64decode(serialize(weight)))
    pipe.recv()
    del weight
    pipe.send("alive")


def test_a_sender_outlives_its_reader():
    """A manager of the reader's own would delete the file at its end, and torch abort the sender."""
    ours, theirs = CONTEXT.Pipe()
    sender = CONTEXT.Process(target=a_sender, args=(theirs,))
    sender.start()
    content = ours.recv()
    told, tells = CONTEXT.Pipe()
    reader = CONTEXT.Process(target=a_reader, args=(tells, content))
    reader.start()
    assert told.recv() == (5000, [])
    reader.join()
    ours.send("let go")
    sender.join()
    assert sender.exitcode == 0
    assert ours.recv() == "alive"
