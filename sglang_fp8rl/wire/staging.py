"""Shared memory: buffers that a sender fills in turn, and a server opens once.

A buffer gets a name when its memory is allocated, and another one when that is made anew: a name never means
other memory than before. The first bucket in it brings the handle, later ones say the name alone.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from ..errors import RefitError

FLAT = "flattened_tensor"  # what SGLang calls a bucket's memory
BUFFER, NBYTES = "buffer", "nbytes"  # its name, and how much of it the bucket takes
COUNT = 2  # buffers that a sender fills in turn
MOST_OPEN = 32  # that a server keeps: two for each device that a sender's tensors lie on
_PARTS = 8  # of what is free: two buffers, what is not in one yet, and more for others
_FEWEST_PARTS = 4  # of what is free now, where an update before had more
_MUCH_LARGER = 8

# A file of shared memory as torch makes it (`MapInfo`, `map_alloc_alignment` in ATen/MapAllocator.cpp): int32
# readers, padding up to 64 bytes, the tensors.
FILES = Path("/dev/shm")  # where Linux keeps what `shm_open` names
HEADER = 64
READERS = struct.Struct("=i")
# Replicas of a server read what was counted for one, bucket after bucket in the same memory.
_NEVER_THE_LAST_READER = READERS.pack(1 << 30)


def default_bucket_bytes(device: torch.device, before: int = 0) -> int:
    """A bucket's size by what is free where it lies, a power of two up to 2 GiB; 512 MiB where a device does not say. That of
    the update `before`, if there is still room, and none for much larger ones: a server replays buckets that are cut where
    they were."""
    free = free_bytes(device)
    if free is None:
        return 512 << 20
    size = 1 << max(1, min(2 << 30, free // _PARTS)).bit_length() - 1
    return before if size // _MUCH_LARGER < before <= free // _FEWEST_PARTS else size


@dataclass
class _Buffer:
    memory: torch.Tensor
    name: str = field(default_factory=lambda: uuid4().hex)
    is_told: bool = False


class StagingBuffers:
    """`COUNT` buffers for each device that buckets come from: one is filled while the server reads the other.

    The pages of a fresh one are made and zeroed first, which takes a CPU longer than filling it. A sender makes
    the next bucket while one is on its way, and no more, so the buffer that it takes is that of a bucket which was
    answered for.
    """

    def __init__(self) -> None:
        self._buffers = defaultdict[torch.device, deque[_Buffer]](deque)

    def are_made(self, device: torch.device) -> bool:
        """Whether all are there, and the next bucket takes one of them."""
        return len(self._buffers[device]) == COUNT

    def take(
        self, nbytes: int, device: torch.device, wanted: int = 0, *, is_larger: bool = False
    ) -> torch.Tensor:
        """The memory of the buffer that was taken longest ago, made anew as `allocate` does where that is too small; or of
        a new one in the place of the last, which is being filled, is not sent and has to be larger."""
        buffers, buffer = self._buffers[device], None
        if is_larger:
            buffers.pop()
        elif self.are_made(device):
            buffer = buffers.popleft()
        if buffer is None or buffer.memory.numel() < nbytes:
            buffer = None  # the old one goes before the new one comes
            buffer = _Buffer(allocate(nbytes, device, wanted))
        buffers.append(buffer)
        self._taken = buffer
        return buffer.memory

    def reference(self, nbytes: int) -> dict[str, Any]:
        """What a bucket says of the buffer that was taken last; its memory too, for the first time."""
        buffer, buffers = self._taken, self._buffers.values()
        said: dict[str, Any] = {
            BUFFER: buffer.name,
            NBYTES: nbytes,
            "buffers": [one.name for two in buffers for one in two],
            "owner": _process(os.getpid()),
        }
        if not buffer.is_told:
            said[FLAT], buffer.is_told = buffer.memory, True
        return said


class OpenBuffers:
    """The buffers of one sender that this process has open. What the sender does not name any more is let go."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}
        self._watched: set[str] = set()  # senders, each until it ends
        self._of = ""  # the sender of what is open

    def __len__(self) -> int:
        return len(self._memory)

    def put_memory_into(self, payload: dict[str, Any]) -> None:
        """Give a bucket that names a buffer its memory, in place: a draft model is handed the same payload. Raises
        `RefitError` if its buffer is not open, was opened before, or is shorter."""
        name, brought = payload.pop(BUFFER), payload.get(FLAT)
        kept = payload["buffers"][:MOST_OPEN]
        self._memory = {one: memory for one, memory in self._memory.items() if one in kept}
        memory = self._memory.get(name)
        if brought is not None:
            if memory is not None:
                raise _misused(name, "its handle came before", "a handle is opened once")
            memory = self._memory[name] = brought
            self._let_go_behind(payload["owner"])
        if memory is None:
            rule = "the first bucket in a buffer brings its handle, in each refit"
            raise _misused(name, "not open here", rule)
        nbytes = payload[NBYTES]
        if type(nbytes) is not int or not 0 <= nbytes <= len(memory):
            value = f"{nbytes!r} bytes of {len(memory)}"
            raise _misused(name, value, "a bucket lies in its buffer")
        payload[FLAT] = memory[:nbytes]

    def close(self) -> None:
        """Let go of all, so that the sender's memory is free when it lets go too."""
        if self._memory:
            self._memory = {}
            if torch.cuda.is_initialized():
                torch.cuda.ipc_collect()

    def _let_go_behind(self, owner: str) -> None:
        """When the sender ends its memory is to be free, though no request comes any more."""
        self._of, pid = owner, int(owner.rpartition(":")[2])
        if owner in self._watched or owner != _process(pid):
            return  # of another container: the next sender's first bucket lets go
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return
        self._watched.add(owner)
        threading.Thread(target=self._wait, args=(process, owner), daemon=True).start()

    def _wait(self, process: int, owner: str) -> None:
        wait([process])
        os.close(process)
        self._watched.discard(owner)
        if self._of == owner:
            self.close()


def _process(pid: int) -> str:
    """A process's number, and among which processes it counts: containers have numbers of their own."""
    return f"{os.readlink('/proc/self/ns/pid')}:{pid}"


def _misused(name: Any, value: str, rule: str) -> RefitError:
    return RefitError(
        f"buffer {str(name)[:40]!r}",
        value,
        rule,
        "Send the update again, whole, with RefitClient; nothing of this bucket was read.",
    )


OPEN_BUFFERS = OpenBuffers()  # of this process, whose handles they are


def allocate(nbytes: int, device: torch.device, wanted: int = 0) -> torch.Tensor:
    """uint8 memory that other processes can be given a handle of; of `wanted` bytes, and some for a scale behind them,
    where that leaves as much free. Raises `RefitError` where there is no room for `nbytes`.

    On a CPU its file is deleted with it, read or not. torch deletes a file when nobody reads it any more,
    and aborts the process if it is gone by then; so more readers are counted than there will be.
    """
    free = refuse_without_room(nbytes, device)
    if wanted:
        wanted = max(nbytes, wanted) * 33 // 32
        nbytes = wanted if free is None or wanted <= free // 2 else nbytes
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    shared = torch.UntypedStorage._new_using_filename_cpu(nbytes)
    handle = shared._share_filename_cpu_()[1]  # `/torch_PID_…`
    file = FILES / os.fsdecode(handle).removeprefix("/")
    with file.open("r+b") as header:
        header.write(_NEVER_THE_LAST_READER)
    # Also when this process ends; not when one that it forked does.
    Finalize(shared, file.unlink, kwargs={"missing_ok": True}, exitpriority=0)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(shared)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that could be allocated there; None of a device that does not say."""
    if device.type == "cpu":
        files = os.statvfs(FILES)
        return files.f_bavail * files.f_frsize
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def refuse_without_room(nbytes: int, device: torch.device) -> int | None:
    """As `free_bytes`. Raises `RefitError` if these are fewer."""
    free = free_bytes(device)
    if free is None or nbytes + HEADER <= free:
        return free
    raise RefitError(
        f"a bucket of {nbytes} bytes",
        f"{free} bytes are free {f'in {FILES}' if device.type == 'cpu' else f'on {device}'}",
        "a bucket lies in shared memory until the server has read it, and the next one beside it",
        "Send smaller buckets, update(bucket_bytes=…), or make room; a tensor is not divided.",
    )
