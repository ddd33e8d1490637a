"""Exponents folded into the weights of attention layers, and taken out again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...numerics.powers_of_two import multiply_by_powers
from .attention_layers import AttentionLayer


class Fold:
    """Of one served model.

    Attributes:
        exponents: int64 `[layers, 2]`, keys and values: `x * 2**-e` is stored. Zero while unfolded.
    """

    def __init__(self, layers: Sequence[AttentionLayer] = ()) -> None:
        self.layers = layers
        self.exponents = torch.zeros(len(layers), 2, dtype=torch.int64)

    def change(self, exponents: torch.Tensor) -> None:
        """Fold these instead. No kernel may be running on the weights meanwhile: the device is waited for."""
        self._multiply(-self.exponents)
        self._multiply(exponents)
        self.exponents = exponents

    @contextmanager
    def unfolded(self) -> Iterator[None]:
        """The weights are as they were loaded in here; folded again afterwards, whatever happens."""
        before = self.exponents
        try:
            self.change(torch.zeros_like(before))
            yield
        finally:
            self.change(before)

    def _multiply(self, exponents: torch.Tensor) -> None:
        if not exponents.any():
            return
        tensors: list[torch.Tensor] = []
        powers: list[int] = []
        for layer, sides in zip(self.layers, exponents.tolist(), strict=True):
            for down, up, exponent in zip(layer.down, layer.up, sides, strict=True):
                tensors += (*down, *up)
                powers += [-exponent] * len(down) + [exponent] * len(up)
        synchronize = torch.get_device_module(tensors[0].device).synchronize
        synchronize()
        multiply_by_powers(tensors, powers)
        synchronize()
