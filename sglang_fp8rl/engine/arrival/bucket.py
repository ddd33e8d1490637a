"""What an update call brings, as a whole: its layout, and where its tensors lie.

Two buckets of the same layout differ in nothing but the values. Layouts of 18,000 tensors are
compared at every refit, so they are lists of plain attributes, compared by `==`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from numbers import Integral
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import RefitError
from ...wire.layout_text import from_text

_SHAPE, _DTYPE, _NAME = attrgetter("shape"), attrgetter("dtype"), attrgetter("name")
_ALIGNMENT = 16
_DEVICE = attrgetter("device")
_METADATA = attrgetter("name", "shape", "dtype", "start_idx", "end_idx")
_MOST = 1 << 62  # more bytes than any buffer has


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

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._pairs)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous() if tensor.layout is torch.strided else tensor  # refused by its name


class FlatBucket:
    """Tensors in one piece of memory, as SGLang's `FlattenedTensorBucket` sends them.

    The tensors themselves are made only when somebody asks for them.

    Args:
        flat: uint8, 1-D, contiguous.
        metadata: per tensor `name`, `shape`, `dtype`, and `start_idx`, `end_idx` in bytes; or all
            of them as the text of `layout_text`.
    """

    def __init__(self, flat: torch.Tensor, metadata: Sequence[Any] | str) -> None:
        # Recipes and kernels read by address, some of them 16 bytes at once.
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
        """The same bucket, copied there."""
        return FlatBucket(self._flat.to(device), self._given)

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


def check_layout(metadata: Sequence[Any], nbytes: int) -> None:
    """Check that every tensor of a flattened bucket lies inside it, and on nobody else.

    A recorded layout is replayed by address, where a start that is negative (but valid as a Python
    slice) would be a read before the buffer.

    Args:
        metadata: per tensor `name`, `shape`, `dtype`, and `start_idx`, `end_idx` in bytes.
        nbytes: of the buffer.

    Raises:
        RefitError: naming the first tensor that lies outside, is not as long as its shape says, is
            not aligned to its elements, overlaps with another one, or is described by other things
            than numbers. Nothing was read.
    """
    if not metadata:
        return
    _check_types(metadata)
    starts = _bytes(one.start_idx for one in metadata)
    ends = _bytes(one.end_idx for one in metadata)
    sizes = _bytes(one.dtype.itemsize for one in metadata)
    lengths = _bytes(math.prod(one.shape, start=one.dtype.itemsize) for one in metadata)
    sides = _bytes(min(one.shape, default=0) for one in metadata)
    order = np.argsort(starts, kind="stable")
    behind = np.zeros(len(metadata), np.int64)
    behind[order[1:]] = np.maximum.accumulate(ends[order])[:-1]
    rules = (
        ((starts < 0) | (ends > nbytes), f"a tensor lies within the bucket's {nbytes} bytes"),
        (
            (ends - starts != lengths) | (sides < 0),
            "a tensor is as long as its shape and dtype say",
        ),
        (starts % sizes != 0, "a tensor starts at a multiple of its element size"),
        ((starts < behind) & (lengths > 0), "no two tensors of a bucket share bytes"),
    )
    for is_bad, rule in rules:
        if is_bad.any():
            raise _misplaced(metadata[int(np.flatnonzero(is_bad)[0])], rule)


def _check_types(metadata: Sequence[Any]) -> None:
    for one in metadata:
        numbers = (one.start_idx, one.end_idx, *one.shape)
        if not all(isinstance(number, Integral) for number in numbers):
            raise _misplaced(one, "offsets and shapes are whole numbers")
        if not isinstance(one.dtype, torch.dtype):
            raise _misplaced(one, "a tensor has a dtype of torch")


def _bytes(numbers: Iterable[int]) -> np.ndarray:
    """As int64; what does not fit is as good as `_MOST`."""
    return np.array([max(-_MOST, min(_MOST, number)) for number in numbers], np.int64)


def _misplaced(one: Any, rule: str) -> RefitError:
    return RefitError(
        str(one.name),
        f"{tuple(one.shape)} {one.dtype} at bytes [{one.start_idx}, {one.end_idx})",
        rule,
        "Make the bucket with SGLang's FlattenedTensorBucket or RefitClient.",
    )
