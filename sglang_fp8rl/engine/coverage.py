"""Which parts of a parameter have been written since it was last complete. Pure integers."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Region:
    """A box of a parameter: where a write lands.

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
        dim = max(
            (d for d, s in enumerate(strides) if s == step), key=lambda d: parameter_shape[d]
        )
        if sizes[dim] != 1:
            return None
        sizes[dim] = size
    fits = all(a + n <= full for a, n, full in zip(start, sizes, parameter_shape, strict=True))
    return Region(tuple(start), tuple(sizes)) if fits else None


@dataclass
class Coverage:
    """Boxes of one parameter written since it was last complete.

    A parameter whose boxes together cover all of it is complete again, and its list is emptied.
    """

    shape: tuple[int, ...]
    regions: list[Region] = field(default_factory=list)
    _covered: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, region: Region) -> None:
        with self._lock:
            # A box written twice counts once; boxes that merely overlap replace what they touch,
            # so that the count never claims more than was written.
            kept = [old for old in self.regions if not old.overlaps(region)]
            self._covered += region.numel - sum(
                old.numel for old in self.regions if old.overlaps(region)
            )
            self.regions = [*kept, region]
            if self._covered >= math.prod(self.shape):
                self.regions, self._covered = [], 0

    @property
    def is_partial(self) -> bool:
        return bool(self.regions)

    @property
    def fraction(self) -> float:
        """Share of the elements that are new; 1.0 when nothing is outstanding."""
        return self._covered / math.prod(self.shape) if self.regions else 1.0
