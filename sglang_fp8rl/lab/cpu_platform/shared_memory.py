"""CPU tensors of other processes, mapped to the last byte that they say, without a helper process.

torch opens a handle through a manager process: the sender's, whose socket then stays open for good, or one of its
own. At its end a manager deletes every file that was opened through it, and a sender that lets go of one later is
aborted: "could not unlink the shared memory file". torch also extends a file that is too short with zeros, which
would be served. So files are mapped here, and only the count of readers that torch keeps in them is kept.
"""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from ...errors import RefitError
from ...wire.staging import FILES, HEADER, READERS


def check_shared_memory() -> None:
    """What is unpickled from now on maps shared memory only if it is all there.

    Side effects: two functions of `torch.multiprocessing.reductions` are replaced, under the same names: a
    pickle that is made here says them, and SGLang reads no others.
    """
    by_name, by_descriptor = reductions.rebuild_storage_filename, reductions.rebuild_storage_fd
    if not hasattr(by_name, "__wrapped__"):
        reductions.rebuild_storage_filename = functools.wraps(by_name)(_mapped_by_name)
        reductions.rebuild_storage_fd = functools.wraps(by_descriptor)(_mapped_by_descriptor)


def _mapped_by_name(
    cls: Any, manager: bytes, handle: bytes, size: int, dtype: torch.dtype | None = None
) -> Any:
    """As `reductions.rebuild_storage_filename`; the sender counted one reader more for each call.

    Args:
        manager: not asked.
        size: elements of `dtype`, bytes without one.
    """
    file = _checked_file_of(handle)
    nbytes = size if dtype is None else size * dtype.itemsize
    storage = reductions.storage_from_cache(torch.UntypedStorage, handle)
    with _opened(file) as descriptor:
        if storage is None:
            storage = _mapped(file, descriptor, nbytes)
            reductions.shared_cache[handle] = reductions.StorageWeakRef(storage)
        _count_one_reader_less(file, descriptor)
    if dtype is None:
        return storage
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _checked_file_of(handle: bytes) -> Path:
    file = FILES / os.fsdecode(handle).removeprefix("/")
    if file.parent != FILES or not file.name.startswith("torch_"):
        raise RefitError(
            f"shared memory {os.fsdecode(handle)!r}",
            "not a file that torch made",
            "tensors are read from /dev/shm/torch_* only",
            "Send what torch's reductions write; RefitClient does.",
        )
    return file


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    """A descriptor of torch's file, which nobody else counts readers in meanwhile."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise RefitError(
            f"shared memory {file.name}",
            "not there",
            "a tensor is read from its sender's memory",
            "Keep the tensors alive until the server answers, and let server and sender share /dev/shm; "
            "nothing of this request was stored.",
        ) from error
    except OSError as error:  # a link, or somebody else's
        raise RefitError(
            f"shared memory {file.name}",
            f"can't be opened: {error.strerror}",
            "a tensor is read from its sender's memory",
            "Run server and sender as one user; nothing of this request was stored.",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # against the other ranks of this server
        yield descriptor
    finally:
        os.close(descriptor)


def _mapped(file: Path, descriptor: int, nbytes: int) -> torch.UntypedStorage:
    _check_length(file.name, os.fstat(descriptor).st_size - HEADER, nbytes)
    if not nbytes:
        return torch.UntypedStorage(0)
    # Python's own mmap keeps a descriptor for each mapping, and with it the lock.
    path = f"/proc/self/fd/{descriptor}"
    memory = torch.from_file(path, shared=True, size=HEADER + nbytes, dtype=torch.uint8)
    # The storage starts behind the header, and keeps what it lies in.
    return torch.from_numpy(memory.numpy()[HEADER:]).untyped_storage()


def _count_one_reader_less(file: Path, descriptor: int) -> None:
    """The last one deletes the file, as with torch, but never its sender's.

    A handle is counted for one reader, and each data-parallel replica reads it: they would count the
    sender out, whose next update would then be of a file that is gone.
    """
    (readers,) = READERS.unpack(os.pread(descriptor, READERS.size, 0))
    if readers > 1:
        os.pwrite(descriptor, READERS.pack(readers - 1), 0)
    elif not _is_mapped_by_its_sender(file):
        file.unlink(missing_ok=True)


def _is_mapped_by_its_sender(file: Path) -> bool:
    """torch names a file `torch_PID_…`; False of a sender that ended, or that is not to be seen from here."""
    sender = file.name.split("_")[1]
    try:
        maps = (Path("/proc") / sender / "maps").read_text()
    except OSError:
        return False
    return f"{file}\n" in maps


def _mapped_by_descriptor(cls: Any, descriptor: Any, size: int) -> Any:
    """As `reductions.rebuild_storage_fd`, of a file that is long enough."""
    arrived = descriptor.detach()
    try:
        _check_length(f"descriptor {arrived}", os.fstat(arrived).st_size, size)
        key = reductions.fd_id(arrived)
        storage = reductions.storage_from_cache(cls, key)
        if storage is None:
            storage = cls._new_shared_fd_cpu(arrived, size)
            reductions.shared_cache[key] = reductions.StorageWeakRef(storage)
        return storage
    finally:
        os.close(arrived)


def _check_length(name: str, found: int, wanted: int) -> None:
    if found < wanted:
        raise RefitError(
            f"shared memory {name}",
            f"{max(found, 0)} bytes",
            f"the tensors in it take {wanted}, and what is not there would be served as zeros",
            "Keep the tensors alive until the server answers; nothing of this request was stored.",
        )
