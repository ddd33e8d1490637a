"""Which parts of which parameters, and which names, came in which call. Integers and boxes, no tensors."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from ...errors import RefitError
from ..interception.writes import Region

NEVER = -1


def _longer(array: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
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
            _longer(self._parameter, size),
            _longer(self._numel, size),
        )
        self._overlaps, self._stamps = (
            _longer(self._overlaps, size),
            _longer(self._stamps, size, NEVER),
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


MAX_NAMES = 1 << 20  # ten times what the largest checkpoints have


class NamesBrought:
    """When each name came last. Names go by number, so that a bucket that was seen before costs one lookup."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._stamps = np.empty(0, np.int64)

    def numbers_of(self, names: Iterable[str]) -> np.ndarray:
        """A number for each name; it stays the same."""
        numbers = self._numbers
        found = []
        for name in names:
            if len(numbers) >= MAX_NAMES and name not in numbers:
                raise RefitError(
                    name,
                    f"a new name behind {MAX_NAMES} others",
                    "each refit brings the same names, those of the checkpoint",
                    "Look at what the trainer calls its tensors; a server that is started anew forgets them.",
                )
            number = numbers.setdefault(name, len(numbers))
            if number == len(self._names):
                self._names.append(name)
            found.append(number)
        if len(numbers) > len(self._stamps):
            self._stamps = _longer(self._stamps, 2 * len(numbers), NEVER)
        return np.array(found, np.int64)

    def bring(self, numbers: np.ndarray, stamp: int) -> None:
        """These names came in the call of that stamp, which is larger than any before."""
        self._stamps[numbers] = stamp

    def repeated(self, numbers: np.ndarray, since: int) -> str | None:
        """The first of these names that came at that stamp or later."""
        came = self._stamps[numbers] >= since
        return self._names[numbers[int(came.argmax())]] if came.any() else None

    def latest(self, numbers: np.ndarray) -> int:
        """The stamp of the last call that brought any of these names."""
        return int(self._stamps[numbers].max(initial=NEVER))

    def not_brought(self, names: Iterable[str], since: int) -> list[str]:
        """Those of `names` that did not come at that stamp or later."""
        names = list(names)
        came = self._stamps[self.numbers_of(names)] >= since
        return [name for name, has_come in zip(names, came.tolist(), strict=True) if not has_come]
