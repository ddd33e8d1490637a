"""What an update call brings, as a whole: its layout, and where its tensors lie.

Two buckets of the same layout differ in nothing but the values. Layouts of 18,000 tensors are
compared at every refit, so they are lists of plain attributes, compared by `==`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import torch

_SHAPE, _DTYPE, _DEVICE = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")
_NAME, _START = attrgetter("name"), attrgetter("start_idx")
_STRIDE, _ADDRESS = methodcaller("stride"), methodcaller("data_ptr")


class TensorBucket:
    """Named tensors, each in memory of its own.

    Args:
        named_tensors: `(name, tensor)` pairs.
    """

    def __init__(self, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._pairs = named_tensors
        self.names: list[str] = list(map(itemgetter(0), named_tensors))
        self._tensors: list[torch.Tensor] = list(map(itemgetter(1), named_tensors))

    @property
    def key(self) -> tuple:
        """Cheap, and different for most different layouts."""
        return ("tensors", len(self.names), *self.names[:1], *self.names[-1:])

    @cached_property
    def layout(self) -> tuple[list, ...]:
        """Everything a recorded plan depends on."""
        getters = (_SHAPE, _DTYPE, _STRIDE, _DEVICE)
        return (self.names, *(list(map(getter, self._tensors)) for getter in getters))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def addresses(self) -> list[int]:
        """Of the sent memory, by the first number of `place`."""
        return list(map(_ADDRESS, self._tensors))

    def place(self, position: int) -> tuple[int, int]:
        """Which of `addresses` a tensor lies at, and how many bytes behind."""
        return position, 0

    def tensor(self, position: int) -> torch.Tensor:
        return self._tensors[position]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._pairs)


class FlatBucket:
    """Tensors in one piece of memory, as SGLang's `FlattenedTensorBucket` sends them.

    The tensors themselves are made only when somebody asks for them.

    Args:
        flat: uint8, 1-D, contiguous.
        metadata: per tensor `name`, `shape`, `dtype`, and `start_idx`, `end_idx` in bytes.
    """

    def __init__(self, flat: torch.Tensor, metadata: Sequence[Any]) -> None:
        self._flat, self._metadata = flat, metadata
        self.names: list[str] = list(map(_NAME, metadata))

    @property
    def key(self) -> tuple:
        return ("flat", len(self.names), self.nbytes, self._flat.device)

    @cached_property
    def layout(self) -> tuple[list, ...]:
        metadata = self._metadata
        return (self.names, *(list(map(getter, metadata)) for getter in (_SHAPE, _DTYPE, _START)))

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes

    def addresses(self) -> list[int]:
        return [self._flat.data_ptr()]

    def place(self, position: int) -> tuple[int, int]:
        return 0, int(self._metadata[position].start_idx)

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
