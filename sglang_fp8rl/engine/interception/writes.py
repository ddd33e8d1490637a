"""What is written into the model, and where: the final copies of loading, as values.

Every `weight_loader` ends in `narrow(...)` and `copy_` into the parameter. It is run on a *stand-in*: a
`meta` parameter with the real one's class, attributes, shape and strides, but the dtype of what
was sent (SGLang's column-parallel loader refuses to copy BF16 into FP8 before it tries). Copies
into the stand-in are caught by the observer; nothing is copied, and nothing shared is swapped, so
loaders may run in a thread pool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class Region(NamedTuple):
    """A box of a parameter. A tuple, as 18,000 of them are looked up at once.

    Attributes:
        start: first index along each dimension.
        shape: size along each dimension.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def overlaps(self, other: Region) -> bool:
        return all(
            a < b + m and b < a + n
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )

    def __str__(self) -> str:
        return (
            "["
            + ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.shape, strict=True))
            + "]"
        )


def region_of(
    offset: int, shape: tuple[int, ...], stride: tuple[int, ...], parameter_shape: tuple[int, ...]
) -> Region | None:
    """The box that a view of a contiguous parameter covers; None if the view is not a box.

    Args:
        offset: elements from the parameter's start to the view's first one.
        shape, stride: of the view, in elements.
        parameter_shape: of the contiguous parameter.
    """
    strides = [1] * len(parameter_shape)
    for dim in range(len(parameter_shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * parameter_shape[dim + 1]
    start, rest = [], offset
    for step in strides:
        start.append(rest // step if step else 0)
        rest -= start[-1] * step
    sizes = [1] * len(parameter_shape)
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if step not in strides:
            return None
        # Dimensions of size 1 share a stride with their neighbour: take the one that is long.
        dim = max((d for d, s in enumerate(strides) if s == step), key=lambda d: parameter_shape[d])
        if sizes[dim] != 1:
            return None
        sizes[dim] = size
    fits = all(a + n <= full for a, n, full in zip(start, sizes, parameter_shape, strict=True))
    return Region(tuple(start), tuple(sizes)) if fits else None


@dataclass(frozen=True)
class Write:
    """One intercepted copy (or fill) into a parameter.

    Attributes:
        source: what is to be written: a view of what was sent, or a tensor the loader made; None
            for a fill.
        fill: the value, where a loader fills instead of copying (the tail of a padded buffer).
        offset, shape, stride: the destination view, in elements of the parameter's storage.
        region: the box that view covers, or None if it is not a box.
    """

    source: torch.Tensor | None
    fill: float
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    region: Region | None

    def taken_from(self, loaded_weight: torch.Tensor) -> RecordedWrite | None:
        """This write as one that can be repeated for another tensor of the same shape and strides.

        None if the source is not a plain view of what was sent: a loader that made a tensor of
        its own has to run again.
        """
        source = self.source
        if source is None:
            return RecordedWrite(self, True, 0, (), ())
        if (
            source.dtype != loaded_weight.dtype
            or source.untyped_storage()._cdata != loaded_weight.untyped_storage()._cdata
        ):
            return None
        (first, last), (start, end) = extent_of(loaded_weight), extent_of(source)
        if not (first <= start and end <= last):  # of another tensor in the same memory
            return None
        shape, stride = tuple(source.shape), tuple(source.stride())
        return RecordedWrite(replace(self, source=None), False, start - first, shape, stride)

    def destination(self, parameter: torch.Tensor) -> torch.Tensor:
        """The view of the real parameter that this write lands in."""
        return parameter.data.as_strided(
            self.shape, self.stride, parameter.data.storage_offset() + self.offset
        )


@dataclass(frozen=True)
class RecordedWrite:
    """A write whose source is known by its place in the tensor that is sent, not by its memory.

    Attributes:
        is_fill: whether it has no source.
        offset, shape, stride: of the source, in elements of the tensor that is sent.
    """

    write: Write
    is_fill: bool
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def repeat(self, loaded_weight: torch.Tensor) -> Write:
        """The same write, from a tensor of the recorded shape and strides."""
        if self.is_fill:
            return self.write
        offset = loaded_weight.storage_offset() + self.offset
        source = loaded_weight.as_strided(self.shape, self.stride, offset)
        return replace(self.write, source=source)


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first element of its storage that a tensor touches, and the one behind the last."""
    first = int(tensor.storage_offset())
    if not tensor.numel():
        return first, first
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return first, first + 1 + sum((size - 1) * step for size, step in steps)


def write_into(
    whole: torch.Tensor, view: torch.Tensor, source: torch.Tensor | None, fill: float
) -> Write:
    """A copy of `source` (or the fill) into `view`, which lies in the memory of `whole`."""
    offset = int(view.storage_offset()) - int(whole.storage_offset())
    shape, stride = tuple(view.shape), tuple(view.stride())
    is_box = whole.is_contiguous()
    region = region_of(offset, shape, stride, tuple(whole.shape)) if is_box else None
    return Write(source, fill, offset, shape, stride, region)


def make_stand_in(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A meta parameter that a loader can't tell from `parameter`, but for dtype and device."""
    data = torch.empty_strided(
        tuple(parameter.shape), parameter.stride(), dtype=dtype, device="meta"
    )
    stand_in = torch.Tensor._make_subclass(type(parameter), data, False)
    stand_in.__dict__.update(parameter.__dict__)
    return stand_in


class LoaderWrites:
    """What one loader did with a stand-in.

    Attributes:
        writes: its copies and fills. None is an answer: this rank holds nothing of the tensor (an
            expert of another rank).
        other: an operation that is neither, at which it was stopped; empty if there was none.
        is_all: whether it did nothing else that was seen.
    """

    def __init__(self, stand_in: torch.Tensor, parameter: torch.Tensor) -> None:
        self.stand_in, self._storage = stand_in, storage_of(stand_in)
        self._parameter = storage_of(parameter)
        self.writes: list[Write] = []
        self.other = ""
        self.is_all = True

    def has(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) == self._storage

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether it is (a part of) what the stand-in stands for."""
        return storage_of(tensor) == self._parameter


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the storage of a tensor, also on `meta`; no two that live have the same."""
    return tensor.untyped_storage()._cdata
