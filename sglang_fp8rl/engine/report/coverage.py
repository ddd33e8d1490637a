"""Which parts of which parameters came in which call, and which of them a full refit writes. Integers and boxes."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...formats import scale_suffixes
from ..interception import Region
from ..model.landings import Known, NameTable
from ..model.parameters import Target

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


class FullExtent:
    """Compares what a refit wrote with what the load at startup (or a probe of it) wrote.

    Elements are counted, not names: a trainer may send experts fused, or a weight with its scale. What
    a loader writes otherwise than in boxes has to be reached by one.
    """

    def __init__(
        self, targets: Sequence[Target], coverage: CoverageTable, names: NameTable
    ) -> None:
        self._targets, self._coverage, self._names = targets, coverage, names
        self._known = -1  # names that the arrays below are of
        self._elements = np.zeros(0, np.int64)
        self._is_reached = self._was_never = self._are_no_biases = np.zeros(0, bool)
        self._made_into: dict[str, int | None] = {}  # by name the parameter that it alone writes

    def left_out(self, since: int) -> tuple[np.ndarray, list[str]]:
        """Per parameter, whether some of it was left out since that stamp; and names of which no box says so.

        With these SGLang does more than copy boxes. One that alone writes a parameter is not among them if that was
        reached since: it may have come by another name.
        """
        self._count()
        reached_at = self._coverage.reached_at
        written, has_come = self._coverage.new_elements(since), reached_at >= since
        is_whole = (written >= self._elements) | (self._was_never & has_come & (written == 0))
        is_whole |= self._are_no_biases & (reached_at == NEVER)
        has_all = has_come & ((written == 0) | (written >= self._coverage.sizes))
        names = [one for one, at in self._made_into.items() if at is None or not has_all[at]]
        return ~is_whole | (self._is_reached & ~has_come), names

    def names_of(
        self, lacking: np.ndarray, not_brought: Callable[[list[str]], list[str]]
    ) -> list[str]:
        """What would have brought these parameters: names, or a parameter's own where all came.

        Args:
            not_brought: which of these names did not come.
        """
        wanted = set(np.flatnonzero(lacking).tolist())
        names = [
            name
            for name, known in self._names.known.items()
            if any(landing.target.index in wanted for landing in known.landings)
        ]
        found = not_brought(names)
        led_to = {
            landing.target.index for name in found for landing in self._names.known[name].landings
        }
        return found + [self._targets[index].name for index in sorted(wanted - led_to)]

    def _count(self) -> None:
        """Count once for the names there are."""
        known, sizes = self._names.known, self._coverage.sizes
        if self._known == len(known):
            return
        self._known = len(known)
        landings = [landing for one in known.values() for landing in one.landings]
        indices = {name: _indices(one) for name, one in known.items()}
        writers = Counter(itertools.chain.from_iterable(indices.values()))
        self._made_into = {
            name: next((at for at in indices[name] if len(indices[name]) == writers[at] == 1), None)
            for name, one in known.items()
            if not one.is_counted
        }
        self._is_reached = np.zeros(len(sizes), bool)
        self._is_reached[[one.target.index for one in landings]] = True
        counted = np.zeros_like(sizes)
        for index, box in {(one.target.index, box) for one in landings for box in one.regions}:
            counted[index] += 0 if box is None else box.numel
        # What the start did not write is lacking until an update writes it.
        self._was_never = ~self._is_reached & self._each(_is_sent)
        never = set(np.flatnonzero(self._was_never).tolist())
        self._are_no_biases = self._each(lambda one: one.index in never and _is_no_bias(one))
        written = self._coverage.new_elements(0)
        is_part_of = self._each(lambda one: one.is_fused) & (written > 0) & (written < sizes)
        elements = np.minimum(counted, sizes)
        self._elements = np.where(self._was_never | is_part_of, sizes, elements)

    def _each(self, holds: Callable[[Target], bool]) -> np.ndarray:
        return np.array([holds(one) for one in self._targets], bool)


def _indices(known: Known) -> set[int]:
    """The parameters that a name lands in."""
    return {landing.target.index for landing in known.landings}


def _is_sent(target: Target) -> bool:
    """Whether checkpoints bring it: buffers and positions are computed, a scale comes of its weight."""
    is_computed = target.name.endswith((*scale_suffixes(), "position_ids"))
    return isinstance(target.parameter, torch.nn.Parameter) and not is_computed


def _is_no_bias(target: Target) -> bool:
    """Whether it is a bias of zeros: SGLang's vision attention has one where its model has none."""
    parameter = target.parameter
    return target.name.endswith(".bias") and not (parameter.is_meta or bool(parameter.any()))
