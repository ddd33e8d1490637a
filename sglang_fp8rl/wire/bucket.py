"""What goes over the wire: buckets of tensors as handles of shared memory.

It is what SGLang's own `MultiprocessingSerializer` reads: a `ForkingPickler` stream in base64 that
holds handles, not the weights. Server and client therefore run on one machine, and for CUDA tensors
both have to number the GPUs alike (`CUDA_VISIBLE_DEVICES`).

A server of this package reads the layout of a flattened bucket as one string (`layout_text`). Any
other reads SGLang's metadata by attribute, so sglang is not imported.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import struct
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing

from ..errors import RefitError
from . import layout_text

NamedTensor = tuple[str, torch.Tensor]
COUNT = 2  # buffers that a sender fills in turn
_ALIGNMENT = 16  # a bucket is viewed as each tensor's dtype, so every tensor starts aligned

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


class StagingBuffers:
    """`COUNT` buffers for each device that buckets come from: one is filled while the server reads the other.

    The pages of a fresh one are made and zeroed while it is filled, which takes a CPU longer than filling it. A
    sender makes the next bucket while one is on its way, and no more, so the buffer that it takes is that of a
    bucket which was answered for.

    Attributes:
        least: bytes of a new buffer at least, so that buckets of about one size fit in what is there.
    """

    def __init__(self, least: int = 0) -> None:
        self.least = least
        self._buffers: defaultdict[torch.device, deque[torch.Tensor | None]]
        self._buffers = defaultdict(lambda: deque([None] * COUNT))

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """uint8 [nbytes] of the buffer that was taken longest ago, made anew where that is too small."""
        buffers = self._buffers[device]
        memory = buffers.popleft()
        if memory is None or memory.numel() < nbytes:
            memory = None  # the old one goes before the new one comes
            memory = allocate(max(nbytes, self.least), device)
        buffers.append(memory)
        return memory[:nbytes]


def flatten(
    named_tensors: Sequence[NamedTensor], into: StagingBuffers | None = None
) -> tuple[torch.Tensor, list[SimpleNamespace]]:
    """One uint8 tensor with all of them, in memory `into` or of `allocate`; and where each lies in it."""
    device = named_tensors[0][1].device
    metadata, end = [], 0
    for name, tensor in named_tensors:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + tensor.nbytes
        metadata.append(layout_text.flat_tensor(name, tensor.shape, tensor.dtype, start, end))
    flat = allocate(end, device) if into is None else into.take(end, device)
    for (_, tensor), meta in zip(named_tensors, metadata, strict=True):
        place = flat[meta.start_idx : meta.end_idx].view(meta.dtype).view(meta.shape)
        place.copy_(tensor)
    if into is not None and device.type != "cpu":
        # A receiver waits for the sender's stream where it opens a handle, and not where it has one open still.
        torch.get_device_module(device).current_stream(device).synchronize()
    return flat, metadata


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 memory that other processes can be given a handle of.

    On a CPU its file is deleted with it, read or not. torch deletes a file when nobody reads it any more,
    and aborts the process if it is gone by then; so more readers are counted than there will be.
    """
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    with _shared_by_file_name():
        shared = torch.UntypedStorage._new_shared(nbytes, device="cpu")
        handle = shared._share_filename_cpu_()[1]
    file = file_of(handle)
    with file.open("r+b") as header:
        header.write(_NEVER_THE_LAST_READER)
    weakref.finalize(shared, _delete, file, os.getpid())
    return torch.empty(0, dtype=torch.uint8).set_(shared)


def _delete(file: Path, owner: int) -> None:
    if os.getpid() == owner:  # a process that it forked ends too
        file.unlink(missing_ok=True)


def serialize(value: Any) -> str:
    """`value` as `MultiprocessingSerializer.serialize(..., output_str=True)` would, for a server
    that did not start this process: CPU tensors are shared by file name."""
    stream = io.BytesIO()
    with _shared_by_file_name():
        ForkingPickler(stream).dump(value)
    return base64.b64encode(stream.getvalue()).decode("ascii")


@dataclass(frozen=True)
class Payload:
    """One bucket of so many tensors and bytes, serialized.

    Attributes:
        texts: one for each rank, to be read once: a handle counts its readers, and is gone too early if more
            of them open it than it was made for.
        content: what they say, whose memory has to stay until the server answers.
    """

    texts: list[str]
    content: Any
    tensors: int
    nbytes: int


def payload_of(
    bucket: list[NamedTensor],
    ranks: int,
    layout_as_text: bool,
    staging: StagingBuffers | None = None,
) -> Payload:
    """A bucket for all ranks of a server.

    Args:
        layout_as_text: whether the server reads a bucket's layout as text, see `layout_text`.
        staging: where the bucket lies; only for a server that has read all of it when it answers, as
            `is_staged` asks of it.
    """
    flat, metadata = flatten([(name, tensor.detach()) for name, tensor in bucket], staging)
    layout = layout_text.to_text(metadata) if layout_as_text else metadata
    content: dict[str, Any] = {"flattened_tensor": flat, "metadata": layout}
    if staging is not None:
        content["is_staged"] = True
    nbytes = sum(tensor.nbytes for _, tensor in bucket)
    return Payload([serialize(content) for _ in range(ranks)], content, len(bucket), nbytes)


@contextlib.contextmanager
def _shared_by_file_name() -> Iterator[None]:
    """torch's default (file descriptors) is refused between processes that did not start each
    other: `AuthenticationError: digest sent was rejected`."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def buckets_of(
    named_tensors: Iterable[NamedTensor], limit: int
) -> Iterator[tuple[list[NamedTensor], bool]]:
    """Lists of about `limit` bytes, and whether each is the last; a scale stays with its weight, behind which it comes.

    Raises `RefitError` if a name comes twice.
    """
    seen: set[str] = set()
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in named_tensors:
        if name in seen:
            raise RefitError(
                name,
                "yielded twice",
                "an update names each tensor once",
                "Look at what the trainer's iterator yields; the update was ended there.",
            )
        seen.add(name)
        last = bucket[-1][0] if bucket else ""
        is_its_scale = name in (f"{last}_scale", f"{last}_scale_inv")
        if bucket and size + tensor.nbytes > limit and not is_its_scale:
            yield bucket, False
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket, True
