"""Which parts of which parameters came in which call. Integers and boxes."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ..interception import Region

NEVER = -1


class CoverageTable:
    """Boxes of all parameters of a model, each with the stamp of the call that wrote it last: these grow.

    A box has a number of its own, so that a bucket that is replayed is written down in one
    assignment, and the state of 18,000 boxes is one pass over an array.

    Args:
        shapes: of the parameters; a parameter is known here by its position.

    Attributes:
        sizes: of the parameters, in elements.
        reached_at: the stamp of the call that wrote any of a parameter last, boxes or not.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.sizes = np.array([math.prod(shape) for shape in shapes], np.int64)
        self.reached_at = np.full(len(self.sizes), NEVER)
        self._numbers: list[dict[Region, int]] = [{} for _ in shapes]
        # Boxes inside one matrix of a 3-D parameter overlap with no other matrix's.
        self._neighbours: dict[tuple[int, int | None], list[int]] = defaultdict(list)
        self._regions: list[Region] = []
        self._overlapping: dict[int, list[int]] = {}
        # By number.
        self._parameter, self._numel, self._stamps = np.empty((3, 0), np.int64)
        self._overlaps = np.empty(0, bool)
        self._lock = threading.Lock()

    def reached_in(self, stamp: int) -> list[int]:
        """The parameters that this call wrote last."""
        return np.flatnonzero(self.reached_at == stamp).tolist()

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
            more = (0, max(64, number))
            self._parameter, self._numel = np.pad(self._parameter, more), np.pad(self._numel, more)
            self._overlaps = np.pad(self._overlaps, more)
            self._stamps = np.pad(self._stamps, more, constant_values=NEVER)
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

    def write(self, parameters: np.ndarray, numbers: np.ndarray, stamp: int) -> None:
        """These boxes were written by the call of that stamp, which is larger than any before.

        Boxes that merely overlap with one of them are forgotten, so that never more is called new
        than is.
        """
        self.reached_at[parameters] = stamp
        if self._overlaps[numbers].any():
            for number in numbers.tolist():
                self._write(number, stamp)
        else:
            with self._lock:
                self._stamps[numbers] = stamp

    def write_one(self, parameter: int, region: Region | None, stamp: int) -> int | None:
        """As `write`. Returns the number of the box; None for what is no box."""
        self.reached_at[parameter] = stamp
        if region is None:
            return None
        number = self.number_of(parameter, region)
        self._write(number, stamp)
        return number

    def _write(self, number: int, stamp: int) -> None:
        with self._lock:
            for other in self._overlapping.get(number, ()):
                self._stamps[other] = NEVER
            self._stamps[number] = stamp

    def forget(self) -> None:
        """Nothing is written any more."""
        self.reached_at[:] = NEVER
        with self._lock:
            self._stamps[:] = NEVER

    def new_elements(self, since: int) -> np.ndarray:
        """Per parameter, how many elements were written at stamp `since` or later."""
        with self._lock:
            used = len(self._regions)
            is_new = self._stamps[:used] >= since
            weights = self._numel[:used] * is_new
            return np.bincount(self._parameter[:used], weights, len(self.sizes)).astype(np.int64)

    def oldest(self) -> tuple[np.ndarray, np.ndarray]:
        """Parameters that were ever written, by position, and the stamp of the oldest part of each."""
        found, written = self.reached_at.copy(), np.flatnonzero(self.reached_at != NEVER)
        with self._lock:
            boxes = np.flatnonzero(self._stamps[: len(self._regions)] != NEVER)
            np.minimum.at(found, self._parameter[boxes], self._stamps[boxes])
        return written, found[written]

    def overlap(self, numbers: np.ndarray) -> bool:
        """Whether a box comes twice, or overlaps with another of them."""
        among = set(numbers.tolist())
        some = numbers[self._overlaps[numbers]].tolist()
        return len(among) < len(numbers) or not all(
            among.isdisjoint(self._overlapping[one]) for one in some
        )
