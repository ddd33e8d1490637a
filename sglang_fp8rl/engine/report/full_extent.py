"""What a full refit writes: the parts of all parameters that the checkpoint's names lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...errors import Fp8RlError
from ..model.landings import NameTable
from ..model.parameters import Target
from .coverage import CoverageTable


class FullExtent:
    """Compares what a refit wrote with what the load at startup (or a probe of it) wrote.

    Elements are counted, not names: a trainer may send experts fused, or a weight with its scale. What
    a loader writes otherwise than in boxes has to be reached by one.

    Args:
        targets: every parameter.
        coverage: knows every box that was written.
        names: that the model takes.
        learn_names: fills `names` where nothing was loaded at startup.

    Attributes:
        unknown_because: why it is not known what a full refit writes; empty if it is.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        coverage: CoverageTable,
        names: NameTable,
        learn_names: Callable[[], object],
    ) -> None:
        self._targets, self._coverage, self._names = targets, coverage, names
        self._learn_names = learn_names
        self._has_asked = False
        self.unknown_because: list[str] = []
        self._known = -1  # names that the arrays below are of
        self._elements = np.zeros(0, np.int64)
        self._is_reached = np.zeros(0, bool)
        self._made_into: list[str] = []

    def lacking(self, since: int, reached_at: np.ndarray) -> np.ndarray:
        """Per parameter, whether some of it was left out since that stamp.

        Args:
            reached_at: per parameter, the stamp of the call that wrote it last.
        """
        self._count()
        written = self._coverage.new_elements(since)
        return (written < self._elements) | (self._is_reached & (reached_at < since))

    def names_without_boxes(self) -> list[str]:
        """What SGLang computes with instead of copying it: no box of a parameter says whether it was stored."""
        self._count()
        return self._made_into

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
        if not self._names.is_filled and not self._has_asked:
            try:
                self._learn_names()
            except Fp8RlError as error:
                self.unknown_because = [str(error)]
            self._has_asked = True  # not behind any other error, where nothing is known
        if self._known == len(self._names.known):
            return
        self._known = len(self._names.known)
        self._made_into = [n for n, known in self._names.known.items() if not known.landings]
        boxes = {
            (landing.target.index, region)
            for known in self._names.known.values()
            for landing in known.landings
            for region in landing.regions
            if region is not None
        }
        sizes, is_fp8 = self._coverage.sizes, [target.is_fp8 for target in self._targets]
        index = np.fromiter((index for index, _ in boxes), np.int64, len(boxes))
        numel = np.fromiter((region.numel for _, region in boxes), np.float64, len(boxes))
        counted = np.bincount(index, numel, len(sizes)).astype(np.int64)
        self._is_reached = np.zeros(len(sizes), bool)
        self._is_reached[
            [one.target.index for known in self._names.known.values() for one in known.landings]
        ] = True
        is_missing = np.array(is_fp8, bool) & (counted == 0)  # an FP8 weight is never optional
        self._elements = np.where(is_missing, sizes, np.minimum(counted, sizes))
