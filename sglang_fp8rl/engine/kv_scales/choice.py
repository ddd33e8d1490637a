"""Exponents from weights alone: a pure function of what is served, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...numerics.powers_of_two import ExponentRange, exact_range, magnitudes, smallest_exponent
from ...numerics.reference import FP8_MAX
from .attention_layers import AttentionLayer


@dataclass(frozen=True)
class Side:
    """Keys or values of one layer.

    Attributes:
        exponent: `e`; `x * 2**-e` is stored.
        bound: on `|x|`; inf where weights are not finite.
        is_certified: whether nothing that is stored can exceed e4m3's largest number.
    """

    exponent: int = 0
    bound: float = math.inf

    @property
    def is_certified(self) -> bool:
        return self.bound <= math.ldexp(FP8_MAX, self.exponent)


@dataclass(frozen=True)
class LayerChoice:
    """Of one layer."""

    keys: Side = Side()
    values: Side = Side()

    @property
    def exponents(self) -> tuple[int, int]:
        return self.keys.exponent, self.values.exponent


def certified(layers: Sequence[AttentionLayer], group: Any) -> list[LayerChoice]:
    """For each layer the smallest exponents with which nothing can saturate.

    Unfolded weights are read. A collective over `group`: ranks hold different heads, and one exponent
    is for all of them.

    Args:
        group: the ranks that share a layer's heads, on a backend for CPU tensors; None for one rank.
    """
    if not layers:
        return []
    with torch.no_grad():
        bounds = torch.stack([torch.stack(_bounds(layer)) for layer in layers]).cpu()
        moved = torch.stack([torch.stack(_moved(layer)) for layer in layers]).cpu().tolist()
    limits = [[_limits(of_keys), _limits(of_values)] for of_keys, of_values in moved]
    table = torch.tensor(
        [
            [[bound, side.low, -side.high] for bound, side in zip(*one, strict=True)]
            for one in zip(bounds.tolist(), limits, strict=True)
        ],
        dtype=torch.float64,
    )  # [layers, 2, 3]
    table = table.nan_to_num(nan=math.inf, posinf=math.inf)
    if group is not None and torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX, group=group)
    return [LayerChoice(_side(*keys), _side(*values)) for keys, values in table.tolist()]


def _bounds(layer: AttentionLayer) -> list[torch.Tensor]:
    return [layer.key_bound(), layer.value_bound()]


def _moved(layer: AttentionLayer) -> list[torch.Tensor]:
    """Magnitudes of what goes down and what goes up, of keys and of values: each `[2, 2]`."""
    device = layer.input_norm.device
    pairs = ((layer.keys_down, layer.queries_up), (layer.values_down, layer.output_up))
    return [torch.stack([magnitudes(one).to(device) for one in pair]) for pair in pairs]


def _limits(moved: list[list[float]]) -> ExponentRange:
    down, up = (exact_range(*one) for one in moved)
    return -down & up


def _side(bound: float, low: float, minus_high: float) -> Side:
    wanted = smallest_exponent(bound, FP8_MAX) if 0 < bound < math.inf else 0
    return Side(ExponentRange(int(low), int(-minus_high)).nearest(wanted), bound)
