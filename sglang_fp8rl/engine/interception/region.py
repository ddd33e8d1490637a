"""A box of a parameter: where a write lands."""

from __future__ import annotations

import math
from typing import NamedTuple


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
