"""The exponents in force, and when they may move.

Served weights are folded at all times but two: while `load_weights` writes, and while somebody reads
them to compare or to keep (`unfolded`). So codes in the cache always belong to the exponents in force,
and these move only at the moment in which the cache is empty: right after SGLang flushed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch

from ...numerics.powers_of_two import multiply_by_powers
from ..host.boundary import on_every_rank
from .attention_layers import AttentionLayer
from .choice import LayerChoice, chosen, table_of


class Source(Protocol):
    """What exponents are chosen from, where it is not the bounds.

    Attributes:
        room: what a larger value may be of the largest one.
    """

    room: float

    def largest(self, layers: Sequence[AttentionLayer]) -> torch.Tensor:
        """Magnitudes of keys and values, FP64 `[layers, 2]` on the CPU; NaN where nothing is known."""

    def adopted(self, layers: Sequence[AttentionLayer]) -> None:
        """The exponents are those of `largest` now."""


class KvScales:
    """Of one served model.

    Args:
        mode: the option `kv_scales`.
        renew: makes again what was derived from folded weights.

    Attributes:
        is_active: whether this server folds at all.
        chosen: for each layer; empty while nothing is folded.
        is_stale: whether an update came since they were chosen.
        is_frozen: whether a flush was refused that they waited for.
        is_settling: whether the flush of `settle` runs.
        group: of the ranks that choose together.
        moves: how often an exponent of any layer changed after the start.
    """

    def __init__(self, mode: str, renew: Callable[[], None]) -> None:
        self.mode, self._renew = mode, renew
        self.layers: Sequence[AttentionLayer] = ()
        self.chosen: list[LayerChoice] = []
        self.is_active = self.is_stale = self.is_frozen = self.is_settling = False
        self.moves = 0
        self.group: Any = None
        self._source: Source | None = None
        self._wanted: list[LayerChoice] | None = None
        self._was_flushed = False
        self._depth = 0

    def start(
        self, layers: Sequence[AttentionLayer], group: Any, source: Source | None = None
    ) -> None:
        """Choose and fold for the first time, before anything is in the cache. A collective.

        Args:
            source: of the magnitudes that have to fit; None for the bounds.
        """
        self.layers, self.group, self._source = layers, group, source
        self.is_active = True
        self._adopt(self._choose())
        self.moves = 0

    @contextmanager
    def unfolded(self) -> Iterator[None]:
        """The weights are as they were loaded in here; folded again afterwards, whatever happens."""
        self._depth += 1
        try:
            if self._depth == 1:
                self._multiply(-1)
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._multiply(1)

    def note_update(self) -> None:
        """A request brings weights. Called on every rank, whatever becomes of the request there."""
        self.is_stale, self._wanted = True, None

    def cache_is_empty(self, *, during_update: bool = False) -> None:
        """Right after a flush: choose again if an update came since. A collective where scales are folded.

        Args:
            during_update: in the middle of a request, which other ranks may have failed; what follows
                from the flush waits for `end_of_request`.
        """
        if during_update:
            self._was_flushed = True
        elif self.is_active and not on_every_rank(self.group, not self.is_stale):
            self._adopt(self._choose())

    def end_of_request(self) -> None:
        """Behind an update request, whatever became of it: choose again if it emptied every rank's cache.

        A collective where scales are folded.
        """
        was_flushed, self._was_flushed = self._was_flushed, False
        if self.is_active and on_every_rank(self.group, was_flushed and self.is_stale):
            self._adopt(self._choose())

    def settle(self, flush: Callable[[], bool]) -> None:
        """At the end of an update that flushed nothing: flush if an exponent has to move.

        Where requests are running the flush is refused; then the exponents stay, and with them what
        is in the cache is right. A collective where scales are folded.
        """
        if not self.is_active or on_every_rank(self.group, not self.is_stale):
            return
        wanted = self._choose()
        if on_every_rank(self.group, _exponents(wanted) == _exponents(self.chosen)):
            self._adopt(wanted)
            return
        self._wanted = wanted
        self.is_settling = True
        try:
            self.is_frozen = not flush()  # `cache_is_empty` comes before this returns
        finally:
            self.is_settling = False

    def _choose(self) -> list[LayerChoice]:
        if on_every_rank(self.group, self._wanted is not None):
            return cast("list[LayerChoice]", self._wanted)
        source = self._source
        return chosen(self.layers, self.group, self._read, None if source is None else source.room)

    def _read(self) -> torch.Tensor:
        source = self._source
        if source is None:
            with self.unfolded():
                return table_of(self.layers)
        with self._served_unfolded():
            return table_of(self.layers, source.largest(self.layers))

    @contextmanager
    def _served_unfolded(self) -> Iterator[None]:
        """As `unfolded`, and kernels read in here what belongs to these weights: a text may run."""
        try:
            with self.unfolded():
                self._renew()
                yield
        finally:
            self._renew()

    def _adopt(self, choice: list[LayerChoice]) -> None:
        before, after = _exponents(self.chosen), _exponents(choice)
        if before != after:
            self._multiply(-1)
            self.chosen = choice
            self._multiply(1)
            self._renew()
            self.moves += 1
        self.chosen = choice
        self.is_stale = self.is_frozen = False
        self._wanted = None
        if self._source is not None:
            self._source.adopted(self.layers)

    def _multiply(self, sign: int) -> None:
        """Fold (`sign` 1) or unfold (-1). No kernel may be running on these weights meanwhile."""
        if not any(a or b for a, b in _exponents(self.chosen)):
            return
        tensors: list[torch.Tensor] = []
        powers: list[int] = []
        for layer, choice in zip(self.layers, self.chosen, strict=True):
            a, b = (sign * exponent for exponent in choice.exponents)
            for parts, power in (
                (layer.keys_down, -a),
                (layer.queries_up, a),
                (layer.values_down, -b),
                (layer.output_up, b),
            ):
                tensors += parts
                powers += [power] * len(parts)
        is_on_gpu = tensors[0].is_cuda
        if is_on_gpu:
            torch.cuda.synchronize()
        with torch.no_grad():
            multiply_by_powers(tensors, powers)
        if is_on_gpu:
            torch.cuda.synchronize()


def _exponents(choice: list[LayerChoice]) -> list[tuple[int, int]]:
    return [one.exponents for one in choice]
