"""What can arrive at `load_weights`, told apart once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import methodcaller
from typing import Generic, TypeVar

import torch

from ...wire.pair import PAIR_SUFFIX
from .bucket import Bucket

RecipeT = TypeVar("RecipeT")
_is_packed = methodcaller("endswith", PAIR_SUFFIX)


@dataclass(frozen=True)
class Stream:
    """A checkpoint, or whatever else has to be read to be known.

    Attributes:
        weights: `(name, tensor)`, read once.
    """

    weights: Iterable[tuple[str, torch.Tensor]]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.weights)


@dataclass(frozen=True)
class NewBucket:
    """A bucket that no recipe fits: the native loaders write it.

    Attributes:
        is_recorded: whether what they do becomes a recipe.
    """

    bucket: Bucket
    is_recorded: bool

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.bucket)


@dataclass(frozen=True)
class KnownBucket(Generic[RecipeT]):
    """A bucket of a layout that was recorded.

    Attributes:
        recipe: what repeats the writes of that layout.
    """

    bucket: Bucket
    recipe: RecipeT


def has_packed_pairs(bucket: Bucket) -> bool:
    """Whether a weight and its scale come as one tensor in it."""
    return any(map(_is_packed, bucket.names))
