"""Memory of a sender that other processes can be given a handle of."""

from __future__ import annotations

import contextlib
import os
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.multiprocessing

from ..errors import RefitError

# A file of shared memory as torch makes it (`MapInfo`, `map_alloc_alignment` in ATen/MapAllocator.cpp): int32
# readers, padding up to 64 bytes, the tensors.
FILES = Path("/dev/shm")  # where Linux keeps what `shm_open` names
HEADER = 64
READERS = struct.Struct("=i")
# Replicas of a server read what was counted for one, bucket after bucket in the same memory.
_NEVER_THE_LAST_READER = READERS.pack(1 << 30)


def file_of(handle: bytes) -> Path:
    """The file that a handle (`/torch_PID_…`) names."""
    return FILES / os.fsdecode(handle).removeprefix("/")


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 memory that other processes can be given a handle of.

    On a CPU its file is deleted with it, read or not. torch deletes a file when nobody reads it any more,
    and aborts the process if it is gone by then; so more readers are counted than there will be.

    Raises `RefitError` where there is no room.
    """
    free = free_bytes(device)
    if free is not None and nbytes > free:  # filling such a file would kill the process
        raise RefitError(
            f"a bucket of {nbytes} bytes",
            f"{free} bytes are free {f'in {FILES}' if device.type == 'cpu' else f'on {device}'}",
            "a bucket lies in shared memory until the server has read it, and the next one beside it",
            "Send smaller buckets, update(bucket_bytes=…), or make room; a tensor is not divided.",
        )
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    with shared_by_file_name():
        shared = torch.UntypedStorage._new_shared(nbytes, device="cpu")
        handle = shared._share_filename_cpu_()[1]
    file = file_of(handle)
    with file.open("r+b") as header:
        header.write(_NEVER_THE_LAST_READER)
    weakref.finalize(shared, _delete, file, os.getpid())
    return torch.empty(0, dtype=torch.uint8).set_(shared)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that could be allocated there; None of a device that does not say."""
    if device.type == "cpu":
        files = os.statvfs(FILES)
        return files.f_bavail * files.f_frsize
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _delete(file: Path, owner: int) -> None:
    if os.getpid() == owner:  # a process that it forked ends too
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def shared_by_file_name() -> Iterator[None]:
    """torch's default (file descriptors) is refused between processes that did not start each
    other: `AuthenticationError: digest sent was rejected`."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
