"""What goes over the wire: buckets of tensors as handles of shared memory.

It is what SGLang's own `MultiprocessingSerializer` reads: a `ForkingPickler` stream in base64 that
holds handles, not the weights. Server and client therefore run on one machine. A handle of CUDA memory
names its GPU by UUID: each process may number the GPUs as it likes, and see others.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing

from ..errors import RefitError
from . import layout_text
from .handles import HandlePickler

if TYPE_CHECKING:
    from .staging import StagingBuffers

NamedTensor = tuple[str, torch.Tensor]
FLAT = "flattened_tensor"  # what SGLang calls a bucket's memory
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
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise _too_large(nbytes, free_bytes(device), device) from error
    free = free_bytes(device)
    if (
        free is not None and nbytes > free
    ):  # else the process would be killed when it fills the file
        raise _too_large(nbytes, free, device)
    with _shared_by_file_name():
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


def _too_large(nbytes: int, free: int | None, device: torch.device) -> RefitError:
    return RefitError(
        f"a bucket of {nbytes} bytes",
        f"{free} bytes are free {f'in {FILES}' if device.type == 'cpu' else f'on {device}'}",
        "a bucket lies in shared memory until the server has read it, and the next one beside it",
        "Send smaller buckets, update(bucket_bytes=…), or make room; a tensor is not divided.",
    )


def _delete(file: Path, owner: int) -> None:
    if os.getpid() == owner:  # a process that it forked ends too
        file.unlink(missing_ok=True)


def serialize(value: Any) -> str:
    """`value` as `MultiprocessingSerializer.serialize(..., output_str=True)` would, for a server
    that did not start this process: CPU tensors are shared by file name, and a GPU is named by its UUID."""
    stream = io.BytesIO()
    with _shared_by_file_name():
        HandlePickler(stream).dump(value)
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
    on_filled: Callable[[], None] = lambda: None,
) -> Payload:
    """A bucket for all ranks of a server.

    Args:
        layout_as_text: whether the server reads a bucket's layout as text, see `layout_text`.
        staging: where the bucket lies; only for a server of this package, which has read all of it when it answers.
        on_filled: called when all is copied, before handles are made.
    """
    flat, metadata = flatten([(name, tensor.detach()) for name, tensor in bucket], staging)
    on_filled()
    layout = layout_text.to_text(metadata) if layout_as_text else metadata
    named = {FLAT: flat} if staging is None else staging.reference(len(flat))
    content: dict[str, Any] = {**named, "metadata": layout}
    # A handle is for one reader; without one all ranks read the same text.
    texts = [serialize(content) for _ in range(ranks if FLAT in content else 1)]
    nbytes = sum(tensor.nbytes for _, tensor in bucket)
    return Payload(texts * (ranks // len(texts)), content, len(bucket), nbytes)


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
