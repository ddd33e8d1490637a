"""What an update call brings, as a whole: its layout, and where its tensors lie.

Two buckets of the same layout differ in nothing but the values. Layouts of 18,000 tensors are
compared at every refit, so they are lists of plain attributes, compared by `==`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from numbers import Integral
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from ...errors import RefitError, as_text, listed
from ...wire.layout_text import from_text
from ..interception import span_of

_SHAPE, _DTYPE, _NAME = attrgetter("shape"), attrgetter("dtype"), attrgetter("name")
_DEVICE, _LAYOUT = attrgetter("device"), attrgetter("layout")
# Of a bucket, and of a tensor in a copy: recipes and kernels read by address, some of them 16 bytes at once.
_ALIGNMENT = 16


class TensorBucket:
    """Named tensors, each contiguous in memory of its own.

    Args:
        named_tensors: `(name, tensor)` pairs; one with other strides is copied, as such tensors may lie
            in each other's gaps, and so is a lazily negated one, as its memory has the other sign.
    """

    def __init__(self, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        tensors = list(map(itemgetter(1), named_tensors))
        if not all(map(Tensor.is_contiguous, tensors)) or any(map(Tensor.is_neg, tensors)):
            tensors = list(map(_contiguous, tensors))
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
        kinds = list(set(map(_LAYOUT, tensors)))  # sparse ones are of no layout that was recorded
        return self.names, list(map(_SHAPE, tensors)), list(map(_DTYPE, tensors)), devices, kinds

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

    def take_apart(self) -> None:
        """From now on the later one of two tensors that share memory is a copy."""
        for at in np.flatnonzero(overlapping(self._tensors)).tolist():
            self._tensors[at] = self._tensors[at].clone()

    def on_device(self, device: torch.device) -> TensorBucket:
        """The bucket itself where all of it lies on `device`; else one whose tensors do, by one copy.

        Takes memory of the bucket's size on `device` until the call ends, and as much on the device that the first
        of these tensors comes from.
        """
        if set(map(_DEVICE, self._tensors)) == {device}:
            return self
        tensors = list(self._tensors)
        elsewhere = [at for at, tensor in enumerate(tensors) if tensor.device != device]
        copies = copied_together([tensors[at] for at in elsewhere], device)
        for at, copy in zip(elsewhere, copies, strict=True):
            tensors[at] = copy
        return TensorBucket(list(zip(self.names, tensors, strict=True)))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return zip(self.names, self._tensors, strict=True)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    is_strided = tensor.layout is torch.strided
    return tensor.contiguous().resolve_neg() if is_strided else tensor  # refused by its name


def copied_together(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Contiguous copies of tensors, side by side in one buffer on another device."""
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
    """Tensors in one piece of memory, as SGLang's `FlattenedTensorBucket` sends them; made when they are asked for.

    Args:
        flat: uint8, 1-D, contiguous.
        metadata: per tensor an object with `name`, `shape`, `dtype`, and `start_idx`, `end_idx` in bytes, all in its
            `__dict__`, as SGLang's have them; or all of them as the text of `layout_text`.
    """

    def __init__(self, flat: torch.Tensor, metadata: Sequence[Any] | str) -> None:
        is_aligned = flat.data_ptr() % _ALIGNMENT == 0
        self._flat, self._given = flat if is_aligned else flat.clone(), metadata

    @cached_property
    def metadata(self) -> Sequence[Any]:
        """Read and checked; or that of a bucket of the same layout, which was."""
        metadata = from_text(self._given) if isinstance(self._given, str) else self._given
        _check_layout(metadata, self.nbytes)
        return metadata

    @cached_property
    def names(self) -> list[str]:
        return list(map(_NAME, self.metadata))

    @property
    def key(self) -> tuple:
        return ("flat", type(self._given), len(self._given), self.nbytes, self._flat.device)

    @cached_property
    def layout(self) -> tuple[list, ...]:
        if isinstance(self._given, str):
            return ([self._given],)
        # The fastest way to compare all attributes of 18,000 objects: 2 ms.
        return ([meta.__dict__ for meta in self._given],)

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes

    def on_device(self, device: torch.device) -> FlatBucket:
        """As `TensorBucket.on_device`."""
        is_there = self._flat.device == device
        return self if is_there else FlatBucket(self._flat.to(device), self._given)

    def addresses(self) -> list[int]:
        return [self._flat.data_ptr()]

    def place(self, position: int) -> tuple[int, int]:
        return 0, int(self.metadata[position].start_idx)

    def tensor(self, position: int) -> torch.Tensor:
        meta = self.metadata[position]
        return self._flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for position, name in enumerate(self.names):
            yield name, self.tensor(position)


def _check_layout(metadata: Sequence[Any], nbytes: int) -> None:
    """Raises `RefitError` unless every tensor of a flattened bucket lies inside its bytes, and on no other.

    A recorded layout is replayed by address, where a start that is negative (but valid as a Python
    slice) would be a read before the buffer.
    """
    for one in metadata:
        if rule := _broken_rule(one, nbytes):
            raise _misplaced(one, rule)
    starts = np.array([one.start_idx for one in metadata], np.int64)
    ends = np.array([one.end_idx for one in metadata], np.int64)
    shared = np.flatnonzero(_begin_within_another(starts, ends))
    if len(shared):
        raise _misplaced(metadata[shared[0]], "no two tensors of a bucket share bytes")


def _broken_rule(one: Any, nbytes: int) -> str:
    numbers = (one.start_idx, one.end_idx, *one.shape)
    if not all(isinstance(number, Integral) for number in numbers):
        return "offsets and shapes are whole numbers"
    if not isinstance(one.dtype, torch.dtype):
        return "a tensor has a dtype of torch"
    if one.start_idx < 0 or one.end_idx > nbytes:
        return f"a tensor lies within the bucket's {nbytes} bytes"
    size = math.prod(one.shape, start=one.dtype.itemsize)
    if one.end_idx - one.start_idx != size or min(one.shape, default=0) < 0:
        return "a tensor is as long as its shape and dtype say"
    is_aligned = one.start_idx % one.dtype.itemsize == 0
    return "" if is_aligned else "a tensor starts at a multiple of its element size"


def _begin_within_another(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Which of these spans begin within one that begins before them, or at the same place in front of them."""
    order, behind = np.argsort(starts, kind="stable"), np.zeros(len(starts), np.int64)
    behind[order[1:]] = np.maximum.accumulate(ends[order])[:-1]
    return (starts < behind) & (ends > starts)


def overlapping(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Which tensors begin in memory that another one has, bool; of those that begin at one address, the later ones."""
    spans = np.array([span_of(tensor) for tensor in tensors], np.int64).reshape(-1, 2)
    return _begin_within_another(spans[:, 0], spans[:, 1])


def apart(bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a checked bucket for SGLang's loaders, each with a storage of its own: so it is seen who
    keeps it. Of two that share memory the later one is a copy, here and in the bucket."""
    if isinstance(bucket, TensorBucket):  # a flat one of which two do was refused
        bucket.take_apart()
    tensors = [bucket.tensor(at) for at in range(len(bucket.names))]
    return [(name, _alone(one)) for name, one in zip(bucket.names, tensors, strict=True)]


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    data = from_dlpack(to_dlpack(tensor.detach().reshape(-1).view(torch.uint8)))
    return data.view(tensor.dtype).view(tensor.shape)


def _misplaced(one: Any, rule: str) -> RefitError:
    return RefitError(
        str(one.name),
        f"{tuple(one.shape)} {one.dtype} at bytes [{one.start_idx}, {one.end_idx})",
        rule,
        "Make the bucket with SGLang's FlattenedTensorBucket or RefitClient.",
    )


Bucket = TensorBucket | FlatBucket


def bucket_of(weights: Any) -> Bucket | None:
    """`weights` as a bucket; None for an iterator, which has to be read to be known."""
    if isinstance(weights, FlatBucket):
        return weights
    return TensorBucket(weights) if isinstance(weights, list) and weights else None


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
        is_somewhere = tensor.layout is torch.strided and tensor.device.type != "meta"
        if not is_somewhere or (tensor.numel() and not tensor.data_ptr()):
            raise RefitError(
                name,
                f"a tensor of layout {tensor.layout} on {tensor.device.type}",
                "a tensor comes with all of its elements in memory; nothing of this call was stored",
                "Send tensor.to_dense(), or the weight instead of its description on meta.",
            )
