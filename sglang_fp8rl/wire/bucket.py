"""What goes over the wire: buckets of tensors as handles of shared memory.

It is what SGLang's own `MultiprocessingSerializer` reads: a `ForkingPickler` stream in base64 that
holds handles, not the weights. Server and client therefore run on one machine.

A server of this package reads the layout of a flattened bucket as one string (`layout_text`). Any
other reads SGLang's metadata by attribute, so sglang is not imported.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from ..errors import RefitError
from ..formats import weight_name_of
from . import layout_text
from .staging import FLAT, StagingBuffers, allocate

NamedTensor = tuple[str, torch.Tensor]
DEVICE = 6  # which argument of `reductions.rebuild_cuda_tensor` is the GPU's number
_ALIGNMENT = 16  # a bucket is viewed as each tensor's dtype, so every tensor starts aligned


def aligned(place: int) -> int:
    """The first byte from there on at which a tensor may start."""
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def flatten(
    named_tensors: Sequence[NamedTensor], into: StagingBuffers | None = None
) -> tuple[torch.Tensor, list[SimpleNamespace]]:
    """One uint8 tensor with all of them, in memory `into` or of `allocate`; and where each lies in it."""
    device = named_tensors[0][1].device
    metadata, end = [], 0
    for name, tensor in named_tensors:
        start = aligned(end)
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


class HandlePickler(ForkingPickler):
    """Pickles a CUDA tensor as a handle that any process of this machine can open that sees its GPU.

    Each process numbers the GPUs that it sees from 0, so a handle names its GPU by UUID, as SGLang's own clients
    write it; one that SGLang's patch of torch has made so already stays.
    """

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        named = arguments[DEVICE]
        if isinstance(named, int):
            named = str(torch.cuda.get_device_properties(named).uuid)
        return rebuild, (*arguments[:DEVICE], named, *arguments[DEVICE + 1 :])


def serialize(value: Any) -> str:
    """`value` as `MultiprocessingSerializer.serialize(..., output_str=True)` would, for a server
    that did not start this process."""
    stream, before = io.BytesIO(), torch.multiprocessing.get_sharing_strategy()
    # torch's default (file descriptors) is refused between processes that did not start each other:
    # `AuthenticationError: digest sent was rejected`.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        HandlePickler(stream).dump(value)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return base64.b64encode(stream.getvalue()).decode("ascii")


@dataclass(frozen=True)
class Payload:
    """One bucket of so many tensors and bytes, serialized."""

    texts: list[str]  # one for each rank, to be read once: a handle counts its readers
    content: Any  # what they say, whose memory has to stay until the server answers
    tensors: int
    nbytes: int


def payload_of(
    bucket: list[NamedTensor],
    ranks: int,
    layout_as_text: bool,
    staging: StagingBuffers | None = None,
    on_filled: Callable[[], None] = lambda: None,
) -> Payload:
    """A bucket for all ranks of a server, `layout_as_text` and in `staging` only for one of this package, which has read
    all of it when it answers; `on_filled` is called when all is copied, before handles are made."""
    flat, metadata = flatten([(name, tensor.detach()) for name, tensor in bucket], staging)
    on_filled()
    layout = layout_text.to_text(metadata) if layout_as_text else metadata
    named = {FLAT: flat} if staging is None else staging.reference(len(flat))
    content: dict[str, Any] = {**named, "metadata": layout}
    # A handle is for one reader; without one all ranks read the same text.
    texts = [serialize(content) for _ in range(ranks if FLAT in content else 1)]
    nbytes = sum(tensor.nbytes for _, tensor in bucket)
    return Payload(texts * (ranks // len(texts)), content, len(bucket), nbytes)


def sendable(named_tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Pass tensors on. Raises `RefitError` for what has not all of its elements in memory here, or of no dtype that
    travels."""
    for name, tensor in named_tensors:
        if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "full_tensor"):
            raise RefitError(
                name,
                f"a {type(tensor).__name__}",
                "what is sent is a full torch.Tensor",
                "Gather DTensors with full_tensors(named_tensors), LocalShards with assemble(name, shards).",
            )
        is_here = tensor.layout is torch.strided and not tensor.is_meta
        if not is_here or tensor.dtype not in layout_text.DTYPES.values():
            raise RefitError(
                name,
                f"{tensor.dtype}, {tensor.layout}, on {tensor.device.type}",
                f"a tensor comes with its elements in memory, in one of {', '.join(layout_text.DTYPES)}",
                "Send the weight instead of its description on meta; tensor.to_dense(); or another dtype.",
            )
        yield name, tensor


def buckets_of(
    named_tensors: Iterable[NamedTensor], limit: int
) -> Iterator[tuple[list[NamedTensor], bool]]:
    """Lists of about `limit` bytes, and whether each is the last; a scale stays with its weight, behind which it comes.
    Raises `RefitError` if a name comes twice."""
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
        if bucket and size + tensor.nbytes > limit and weight_name_of(name) != last:
            yield bucket, False
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket, True
