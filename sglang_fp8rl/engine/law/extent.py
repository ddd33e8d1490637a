"""What a full refit writes, and what of it one refit left out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from ...formats import scale_suffixes
from ..ledger.coverage import NEVER
from ..ledger.ledger import Ledger
from ..model.parameters import Target


class FullExtent:
    """Compares what a refit wrote with what the load at startup (or a probe of it) wrote.

    Elements are counted, not names: a trainer may send experts fused, or a weight with its scale. What
    a loader writes otherwise than in boxes has to be reached by one.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._targets, self._coverage = ledger.targets, ledger.coverage
        self._names = ledger.names
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
        indices = {
            name: {landing.target.index for landing in one.landings} for name, one in known.items()
        }
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


def _is_sent(target: Target) -> bool:
    """Whether checkpoints bring it: buffers and positions are computed, a scale comes of its weight."""
    is_computed = target.name.endswith((*scale_suffixes(), "position_ids"))
    return isinstance(target.parameter, torch.nn.Parameter) and not is_computed


def _is_no_bias(target: Target) -> bool:
    """Whether it is a bias of zeros: SGLang's vision attention has one where its model has none."""
    parameter = target.parameter
    return target.name.endswith(".bias") and not (parameter.is_meta or bool(parameter.any()))
