"""Tensors that are all there: looked at together and cut into buckets by columns, with next to no Python for each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from ..errors import RefitError
from ..formats import weight_name_of
from .bucket import Bucket, aligned
from .gathering import PLAIN, nbytes_of
from .layout_text import NAMES, Columns
from .sendable import is_freed
from .staging import StagingBuffers

# Of these no tensor is made where another one was, as by an iterator, or a mapping of somebody's own.
_COLLECTIONS = {list, tuple, type({}.items()), type(OrderedDict().items())}


class Listed:
    """Named tensors that keep their memory and values until the last bucket is filled.

    Args:
        pairs: `(name, tensor)`, at least one; each could be sent by itself, and no name is there twice.
    """

    def __init__(self, pairs: list[Any]) -> None:
        self._names: list[str] = [name for name, _ in pairs]
        self._tensors: list[torch.Tensor] = [tensor for _, tensor in pairs]
        self.device = self._tensors[0].device

    @classmethod
    def of(cls, named_tensors: Iterable[Any]) -> Listed | None:
        """None where they are not all there, or one is to be looked at by itself: `sendable` knows more, and says what is wrong."""
        pairs = list(named_tensors) if type(named_tensors) in _COLLECTIONS else []
        is_paired = set(map(type, pairs)) == {tuple} and set(map(len, pairs)) == {2}
        return cls(pairs) if is_paired and _are_plain(*zip(*pairs, strict=True)) else None

    def buckets(
        self, limit: int, staging: StagingBuffers | None = None
    ) -> Iterator[tuple[Bucket, bool]]:
        """As `bucket.buckets_of`, cut at the same places."""
        names, tensors = self._names, self._tensors
        shapes, dtypes = _each("shape", tensors), _each("dtype", tensors)
        sizes = nbytes_of(tensors)
        whole = aligned(sizes)
        starts = np.cumsum(whole) - whole
        ends = starts + sizes
        first = 0
        while first < len(names):
            last = np.searchsorted(ends, starts[first] + min(limit, ends[-1]), "right")
            behind = max(int(last), first + 1)
            if behind < len(names) and weight_name_of(names[behind]) == names[behind - 1]:
                behind += 1
            here, bucket = slice(first, behind), Bucket(limit, 0, staging)
            places = [(of[here] - starts[first]).tolist() for of in (starts, ends)]
            columns = Columns(names[here], shapes[here], dtypes[here], *places)
            _check_unchanged(columns, tensors[here])
            bucket.add_all(columns, tensors[here])
            bucket.close(is_last=behind == len(names))
            yield bucket, behind == len(names)
            first = behind


def _check_unchanged(columns: Columns, tensors: list[torch.Tensor]) -> None:
    """Raise `RefitError` for a tensor that is no more what it was when buckets were cut."""
    for name, shape, dtype, now in zip(*columns[:3], tensors, strict=True):
        if is_freed(now) or now.dtype != dtype or now.shape != shape:
            raise RefitError(
                name,
                f"{dtype} {tuple(shape)}, and {'freed' if is_freed(now) else f'{now.dtype} {tuple(now.shape)}'} by now",
                "the tensors of a list keep memory, dtype and shape until the update returns",
                "Change them behind it, or send an iterator.",
            )


def _are_plain(names: tuple[Any, ...], tensors: tuple[Any, ...]) -> bool:
    """Whether nothing has to be asked about any of them."""
    return (
        set(map(type, names)) == {str}
        and len(set(names)) == len(names)
        and set(map(type, tensors)) <= set(PLAIN)
        and set(_each("dtype", tensors)) <= NAMES.keys()
        and set(_each("layout", tensors)) == {torch.strided}
        and not (any(_each("is_meta", tensors)) or any(map(is_freed, tensors)))
    )


def _each(attribute: str, tensors: Iterable[torch.Tensor]) -> list[Any]:
    return list(map(attrgetter(attribute), tensors))
