"""Which parts of a parameter were written when. Pure integers."""

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
        dim = max((d for d, s in enumerate(strides) if s == step), key=lambda d: parameter_shape[d])
        if sizes[dim] != 1:
            return None
        sizes[dim] = size
    fits = all(a + n <= full for a, n, full in zip(start, sizes, parameter_shape, strict=True))
    return Region(tuple(start), tuple(sizes)) if fits else None


@dataclass
class Coverage:
    """Boxes of one parameter, each with the number of the call that wrote it last."""

    shape: tuple[int, ...]
    calls: dict[Region, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, region: Region, call: int) -> None:
        with self._lock:
            if region not in self.calls:
                # Boxes that merely overlap are forgotten, so that never more is called new than is.
                self.calls = {
                    old: number for old, number in self.calls.items() if not old.overlaps(region)
                }
            self.calls[region] = call

    def new_regions(self, since: int) -> list[Region]:
        """Boxes written by call `since` or later."""
        return [region for region, call in self.calls.items() if call >= since]

    def new_fraction(self, since: int) -> float:
        """Share of the elements written by call `since` or later."""
        new = sum(region.numel for region in self.new_regions(since))
        return new / math.prod(self.shape)

    def is_mixed(self, since: int) -> bool:
        """Whether part of the parameter is new and part of it is not."""
        return 0.0 < self.new_fraction(since) < 1.0


@dataclass
class RefitWindow:
    """Which calls make up the current refit, for clients that never say where one begins.

    A refit is a run of calls in which no tensor comes twice. A call that repeats a tensor starts
    behind the last call that had it, and anew if every weight had been written; what else comes
    after the last weight (norms, the head) still belongs to that refit. A tensor that failed does
    not count as sent, so sending it again mends the refit instead of ending it.
    """

    start: int = 0
    call: int = 0
    is_complete: bool = False
    _is_asked_for: bool = False
    _last_call: dict[str, int] = field(default_factory=dict)

    def begin_call(self, names: list[str]) -> bool:
        """Count one call; `names` is empty where what comes is not known (a checkpoint).

        Returns whether it starts another refit than the call before it.
        """
        self.call += 1
        repeats = any(self._last_call.get(name, -1) >= self.start for name in names)
        is_anew = self._is_asked_for or not names or (self.is_complete and repeats)
        start = self.call if is_anew else self.start
        for name in names:
            start = max(start, self._last_call.get(name, -1) + 1)
        is_new = start != self.start
        self.start, self.is_complete, self._is_asked_for = start, False, False
        return is_new

    def begin_refit(self) -> None:
        """A client that does say so: what follows is another refit."""
        self._is_asked_for = True

    def sent(self, names: set[str]) -> None:
        """Names that this call stored."""
        self._last_call.update(dict.fromkeys(names, self.call))
