"""What goes over the wire: buckets of tensors as handles of shared memory.

It is what SGLang's own `MultiprocessingSerializer` reads: a `ForkingPickler` stream in base64 that
holds handles, not the weights. Server and client therefore run on one machine, and for CUDA tensors
both have to number the GPUs alike (`CUDA_VISIBLE_DEVICES`).

A server of this package reads the layout of a flattened bucket as one string (`layout_text`). Any
other reads SGLang's metadata by attribute, so plain namespaces take the place of its class, and
sglang is not imported.
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing  # registers the reductions of tensors with ForkingPickler

from ..errors import RefitError
from . import layout_text

NamedTensor = tuple[str, torch.Tensor]
_ALIGNMENT = 16  # a bucket is viewed as each tensor's dtype, so every tensor starts aligned


def flatten(named_tensors: Sequence[NamedTensor]) -> tuple[torch.Tensor, list[SimpleNamespace]]:
    """One uint8 tensor with all of them, and where each lies in it.

    On a CPU the buffer is shared memory from the start, so sending it copies nothing again.
    """
    device = named_tensors[0][1].device
    metadata, end = [], 0
    for name, tensor in named_tensors:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + nbytes_of(tensor)
        metadata.append(
            SimpleNamespace(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=start,
                end_idx=end,
                numel=end - start,
            )
        )
    if device.type == "cpu":
        with _shared_by_file_name():
            shared = torch.UntypedStorage._new_shared(end, device="cpu")
        flat = torch.empty(0, dtype=torch.uint8).set_(shared)
    else:
        flat = torch.empty(end, dtype=torch.uint8, device=device)
    for (_, tensor), meta in zip(named_tensors, metadata, strict=True):
        flat[meta.start_idx : meta.end_idx].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return flat, metadata


def serialize(value: Any) -> str:
    """`value` as `MultiprocessingSerializer.serialize(..., output_str=True)` would, for a server
    that did not start this process: CPU tensors are shared by file name."""
    stream = io.BytesIO()
    with _shared_by_file_name():
        ForkingPickler(stream).dump(value)
    return base64.b64encode(stream.getvalue()).decode("ascii")


def payload_of(
    bucket: list[NamedTensor], load_format: str | None, as_text: bool
) -> tuple[str, Any]:
    """The serialized bucket, and what has to stay alive until the server answers.

    Args:
        as_text: whether the server reads a bucket's layout as text, see `layout_text`.
    """
    if load_format is None:
        plain = [(name, tensor.detach()) for name, tensor in bucket]
        return serialize(plain), plain
    flat, metadata = flatten([(name, tensor.detach()) for name, tensor in bucket])
    layout = layout_text.to_text(metadata) if as_text else metadata
    return serialize({"flattened_tensor": flat, "metadata": layout}), flat


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


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the elements, whatever the strides."""
    return tensor.numel() * tensor.element_size()


def buckets_of(
    named_tensors: Iterable[NamedTensor], limit: int
) -> Iterator[tuple[list[NamedTensor], bool]]:
    """Lists of about `limit` bytes, and whether each is the last."""
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in named_tensors:
        nbytes = nbytes_of(tensor)
        if bucket and size + nbytes > limit:
            yield bucket, False
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    if bucket:
        yield bucket, True


def each_once(named_tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Raises `RefitError` at the second tensor of one name."""
    seen: set[str] = set()
    for name, tensor in named_tensors:
        if name in seen:
            raise RefitError(
                name,
                "yielded twice",
                "an update names each tensor once",
                "Look at what the trainer's iterator yields; the update was ended there.",
            )
        seen.add(name)
        yield name, tensor
