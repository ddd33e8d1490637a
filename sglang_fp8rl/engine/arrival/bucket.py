"""What an update call brings, as a whole: its layout, and where its tensors lie.

Two buckets of the same layout differ in nothing but the values. Layouts of 18,000 tensors are
compared at every refit, so they are lists of plain attributes, compared by `==`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from ...errors import RefitError, as_text, listed
from ...wire.bucket import COUNT
from ...wire.layout_text import from_text
from .flat_layout import check_layout

_SHAPE, _DTYPE, _NAME = attrgetter("shape"), attrgetter("dtype"), attrgetter("name")
# Of a bucket, and of a tensor in a copy: recipes and kernels read by address, some of them 16 bytes at once.
_ALIGNMENT = 16
_DEVICE = attrgetter("device")
_METADATA = attrgetter("name", "shape", "dtype", "start_idx", "end_idx")


class TensorBucket:
    """Named tensors, each contiguous in memory of its own.

    Args:
        named_tensors: `(name, tensor)` pairs; one with other strides is copied, as such tensors may lie
            in each other's gaps.
    """

    def __init__(self, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        tensors = list(map(itemgetter(1), named_tensors))
        if not all(map(Tensor.is_contiguous, tensors)):
            named_tensors = [(name, _contiguous(tensor)) for name, tensor in named_tensors]
            tensors = list(map(itemgetter(1), named_tensors))
        self._pairs = named_tensors
        self.names: list[str] = list(map(itemgetter(0), named_tensors))
        self._tensors: list[torch.Tensor] = tensors

    @property
    def key(self) -> tuple:
        """Cheap, and different for most different layouts."""
        return ("tensors", len(self.names), *self.names[:1], *self.names[-1:])

    @cached_property
    def layout(self) -> tuple[list, ...]:
        """Everything a recipe depends on."""
        tensors = self._tensors
        devices = list(map(Tensor.get_device, tensors))
        return self.names, list(map(_SHAPE, tensors)), list(map(_DTYPE, tensors)), devices

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def addresses(self) -> list[int]:
        """Of the sent memory, by the first number of `place`."""
        return list(map(Tensor.data_ptr, self._tensors))

    def place(self, position: int) -> tuple[int, int]:
        """Which of `addresses` a tensor lies at, and how many bytes behind."""
        return position, 0

    def tensor(self, position: int) -> torch.Tensor:
        return self._tensors[position]

    @property
    def devices(self) -> set[torch.device]:
        return set(map(_DEVICE, self._tensors))

    def on_device(self, device: torch.device) -> TensorBucket:
        """The bucket itself where all of it lies on `device`; else one whose tensors do.

        A trainer on a CPU, or one payload for all ranks of a node: the loaders and the kernels read local
        memory afterwards, so such a bucket is recorded and replayed as any other, and by the recipe of any other.
        Takes memory of the bucket's size on `device` until the call ends, and as much on the device that
        tensors come from. One copy for each other device.
        """
        if self.devices == {device}:
            return self
        pairs = list(self)
        for other in self.devices - {device}:
            apart = [at for at, (_, tensor) in enumerate(pairs) if tensor.device == other]
            copies = copied_together([pairs[at][1] for at in apart], device)
            for at, copy in zip(apart, copies, strict=True):
                pairs[at] = (pairs[at][0], copy)
        return TensorBucket(pairs)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._pairs)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous() if tensor.layout is torch.strided else tensor  # refused by its name


def copied_together(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Contiguous copies of tensors of one device, side by side in one buffer on another."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    starts = [0, *accumulate(sizes)]
    gathered = torch.empty(starts[-1], dtype=torch.uint8, device=tensors[0].device)
    for tensor, start in zip(tensors, starts, strict=False):
        _part(gathered, start, tensor).copy_(tensor)
    copied = gathered.to(device)
    return [_part(copied, start, tensor) for tensor, start in zip(tensors, starts, strict=False)]


def _part(buffer: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


class FlatBucket:
    """Tensors in one piece of memory, as SGLang's `FlattenedTensorBucket` sends them.

    The tensors themselves are made only when somebody asks for them.

    Args:
        flat: uint8, 1-D, contiguous.
        metadata: per tensor `name`, `shape`, `dtype`, and `start_idx`, `end_idx` in bytes; or all
            of them as the text of `layout_text`.
    """

    def __init__(self, flat: torch.Tensor, metadata: Sequence[Any] | str) -> None:
        is_aligned = flat.data_ptr() % _ALIGNMENT == 0
        self._flat, self._given = flat if is_aligned else flat.clone(), metadata

    @cached_property
    def _metadata(self) -> Sequence[Any]:
        metadata = from_text(self._given) if isinstance(self._given, str) else self._given
        check_layout(metadata, self.nbytes)
        return metadata

    @cached_property
    def names(self) -> list[str]:
        return list(map(_NAME, self._metadata))

    @property
    def key(self) -> tuple:
        return ("flat", type(self._given), len(self._given), self.nbytes, self._flat.device)

    @cached_property
    def layout(self) -> tuple[list, ...]:
        if isinstance(self._given, str):
            return ([self._given],)
        try:
            # The fastest way to compare all attributes of 18,000 objects: 2 ms.
            return ([meta.__dict__ for meta in self._given],)
        except AttributeError:
            return (list(map(_METADATA, self._given)),)

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes

    @property
    def metadata(self) -> Sequence[Any]:
        return self._metadata

    def take_metadata(self, metadata: Sequence[Any]) -> None:
        """Take those of a bucket of the same layout, to save reading this one's own."""
        self._metadata = metadata

    def on_device(self, device: torch.device) -> FlatBucket:
        """As `TensorBucket.on_device`."""
        return self if self.devices == {device} else FlatBucket(self._flat.to(device), self._given)

    def addresses(self) -> list[int]:
        return [self._flat.data_ptr()]

    def place(self, position: int) -> tuple[int, int]:
        return 0, int(self._metadata[position].start_idx)

    @property
    def devices(self) -> set[torch.device]:
        return {self._flat.device}

    def tensor(self, position: int) -> torch.Tensor:
        meta = self._metadata[position]
        return self._flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for position, name in enumerate(self.names):
            yield name, self.tensor(position)


Bucket = TensorBucket | FlatBucket


def bucket_of(weights: Any) -> Bucket | None:
    """`weights` as a bucket; None for an iterator, which has to be read to be known."""
    if isinstance(weights, FlatBucket):
        return weights
    if isinstance(weights, list) and weights:
        return TensorBucket(weights)
    return None


def check_bucket(bucket: Bucket) -> None:
    """Raises `RefitError` for a name that is no text or comes twice, and for a tensor that has no plain memory."""
    for name in bucket.names:
        if not isinstance(name, str) or (not name.isascii() and as_text(name) != name):
            raise RefitError(
                ascii(name),
                "no text that could be written down",
                "a tensor has a name of the checkpoint; nothing of this call was stored",
                "Look at what the trainer's iterator yields.",
            )
    twice = [name for name, count in Counter(bucket.names).items() if count > 1]
    if twice:
        raise RefitError(
            listed(twice),
            f"{len(twice)} name(s) that come twice in one call",
            "a call names each tensor once; nothing of it was stored",
            "Look for what the trainer's iterator yields again.",
        )
    for name, tensor in bucket if isinstance(bucket, TensorBucket) else ():
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise RefitError(
                name,
                f"a tensor of layout {tensor.layout} on {tensor.device.type}",
                "a tensor comes with all of its elements in memory; nothing of this call was stored",
                "Send tensor.to_dense(), or the weight instead of its description on meta.",
            )


class SenderMemory:
    """What a sender says that it will use again (`is_staged`), for each rank: open for the length of an update.

    A handle is closed with the last tensor that uses it. `RefitClient` sends bucket after bucket in the same
    two buffers, so each would be opened and closed again for every second bucket.
    """

    def __init__(self) -> None:
        self._open: dict[int, torch.UntypedStorage] = {}

    def __len__(self) -> int:
        return len(self._open)

    def hold(self, flat: torch.Tensor) -> None:
        """Keep this one and the one before it; everything that was read from it has been read.

        Waits for the device: the sender overwrites the memory once it is answered.
        """
        wait_for_reads(flat)
        storage = flat.untyped_storage()
        self._open.pop(storage.data_ptr(), None)
        self._open[storage.data_ptr()] = storage
        while len(self._open) > COUNT:
            del self._open[next(iter(self._open))]

    def release(self) -> None:
        """The update is over: the sender may have its memory back."""
        self._open.clear()


def wait_for_reads(flat: torch.Tensor) -> None:
    """Until everything that was asked of the device has been read from this memory."""
    if flat.device.type != "cpu":
        torch.get_device_module(flat.device).synchronize(flat.device)
