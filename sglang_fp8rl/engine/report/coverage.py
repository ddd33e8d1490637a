"""Which parts of which parameters came in which call. Integers and boxes, no tensors."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ..interception import Region

NEVER = -1


def longer(array: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    """A copy with room for `size` things, the new ones `fill`."""
    return np.concatenate([array, np.full(size - len(array), fill, array.dtype)])


class CoverageTable:
    """Boxes of all parameters of a model, each with the stamp of the call that wrote it last: these grow.

    A box has a number of its own, so that a bucket that is replayed is written down in one
    assignment, and the state of 18,000 boxes is one pass over an array.

    Args:
        shapes: of the parameters; a parameter is known here by its position.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.sizes = np.array([math.prod(shape) for shape in shapes], np.int64)
        self._numbers: list[dict[Region, int]] = [{} for _ in shapes]
        # Boxes inside one matrix of a 3-D parameter overlap with no other matrix's.
        self._neighbours: dict[tuple[int, int | None], list[int]] = defaultdict(list)
        self._regions: list[Region] = []
        self._overlapping: dict[int, list[int]] = {}
        # By number.
        self._parameter, self._numel, self._stamps = np.empty((3, 0), np.int64)
        self._overlaps = np.empty(0, bool)
        self._lock = threading.Lock()

    def number_of(self, parameter: int, region: Region) -> int:
        """The number of a box of a parameter; it stays the same."""
        numbers = self._numbers[parameter]
        with self._lock:
            if region not in numbers:
                numbers[region] = self._add(parameter, region)
            return numbers[region]

    def _add(self, parameter: int, region: Region) -> int:
        number = len(self._regions)
        if number == len(self._stamps):
            self._grow(max(64, 2 * number))
        self._regions.append(region)
        self._parameter[number], self._numel[number] = parameter, region.numel
        matrix = region.start[0] if len(region.start) == 3 and region.shape[0] == 1 else None
        groups = [(parameter, None), (parameter, matrix)]
        if matrix is None:
            groups = [key for key in self._neighbours if key[0] == parameter]
        for key in dict.fromkeys(groups):
            for other in self._neighbours.get(key, ()):
                if self._regions[other].overlaps(region):
                    for one, two in ((number, other), (other, number)):
                        self._overlapping.setdefault(one, []).append(two)
                        self._overlaps[one] = True
        self._neighbours[parameter, matrix].append(number)
        return number

    def _grow(self, size: int) -> None:
        self._parameter, self._numel = (
            longer(self._parameter, size),
            longer(self._numel, size),
        )
        self._overlaps, self._stamps = (
            longer(self._overlaps, size),
            longer(self._stamps, size, NEVER),
        )

    def write(self, numbers: np.ndarray | list[int], stamp: int) -> None:
        """These boxes were written by the call of that stamp, which is larger than any before.

        Boxes that merely overlap with one of them are forgotten, so that never more is called new
        than is.
        """
        with self._lock:
            if self._overlaps[numbers].any():
                for number in np.asarray(numbers).tolist():
                    self._stamps[self._overlapping.get(number, [])] = NEVER
                    self._stamps[number] = stamp
            else:
                self._stamps[numbers] = stamp

    def forget(self) -> None:
        """No box is written any more."""
        with self._lock:
            self._stamps[:] = NEVER

    def new_elements(self, since: int) -> np.ndarray:
        """Per parameter, how many elements were written at stamp `since` or later."""
        with self._lock:
            used = len(self._regions)
            is_new = self._stamps[:used] >= since
            weights = self._numel[:used] * is_new
            return np.bincount(self._parameter[:used], weights, len(self.sizes)).astype(np.int64)

    def oldest(self) -> np.ndarray:
        """Per parameter, the stamp of its oldest box; a large number if it has none."""
        with self._lock:
            used = len(self._regions)
            found = np.full(len(self.sizes), np.iinfo(np.int64).max)
            is_written = self._stamps[:used] != NEVER
            np.minimum.at(
                found, self._parameter[:used][is_written], self._stamps[:used][is_written]
            )
            return found

    def new_fraction(self, since: int) -> np.ndarray:
        """Per parameter, the share of it that was written at stamp `since` or later."""
        return self.new_elements(since) / np.maximum(self.sizes, 1)

    def overlap(self, numbers: np.ndarray) -> bool:
        """Whether a box comes twice, or one of them overlaps with any other box there is."""
        return len(np.unique(numbers)) < len(numbers) or bool(self._overlaps[numbers].any())

    def new_regions(self, parameter: int, since: int) -> list[Region]:
        """Boxes of one parameter written at stamp `since` or later."""
        numbers = self._numbers[parameter]
        return [region for region, number in numbers.items() if self._stamps[number] >= since]
