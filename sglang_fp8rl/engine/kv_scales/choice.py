"""Exponents from what has to fit into e4m3, within what weights can be moved by: the same on every rank."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import RefitError
from ...numerics.powers_of_two import ExponentRange, exact_range, magnitudes, smallest_exponent
from ...numerics.reference import FP8_MAX
from .attention_layers import AttentionLayer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Side:
    """Keys or values of one layer.

    Attributes:
        exponent: `e`; `x * 2**-e` is stored.
        bound: on `|x|`, from the weights; inf where they are not finite.
        largest: that was measured or announced, where the exponent is from that; NaN or inf if nothing was.
        is_certified: whether nothing that is stored can exceed e4m3's largest number.
    """

    exponent: int = 0
    bound: float = math.inf
    largest: float | None = None

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


def chosen(
    layers: Sequence[AttentionLayer],
    group: Any,
    read: Callable[[], torch.Tensor],
    room: float | None = None,
) -> list[LayerChoice]:
    """For each layer the smallest exponents with which `largest * room` fits; 0 where it is not known.

    A collective over `group`: ranks hold different heads, and one exponent is for all of them.

    Args:
        group: the ranks that share a layer's heads, on a backend for CPU tensors; None for one rank.
        read: unfolds the weights of this rank, and returns `table_of` them.
        room: what a larger value than the largest may be of it; None where the bounds have to fit.

    Raises:
        RefitError: another rank could not read; on this one, what `read` raises.
    """
    if not layers:
        return []
    error: Exception | None = None
    table = torch.zeros(len(layers) + 1, 2, 4, dtype=torch.float64)
    try:
        table[:-1] = read()
    except Exception as raised:
        # Told to all ranks, which would wait for this one, and raised on each.
        logger.exception("fp8rl: no scales of the KV cache")
        error, table[-1] = raised, 1
    if group is not None and torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX, group=group)
    if error is not None:
        raise error
    if table[-1].any():
        raise RefitError(
            "the scales of the KV cache",
            "another rank could not read its weights",
            "one exponent is for all ranks",
            "The server's log says more. Send all weights again.",
        )
    return [
        LayerChoice(*(_side(side, room or 1.0, room is not None) for side in both))
        for both in table[:-1].tolist()
    ]


def table_of(layers: Sequence[AttentionLayer], largest: torch.Tensor | None = None) -> torch.Tensor:
    """What exponents are chosen from, of unfolded weights. FP64 `[layers, 2, 4]` on the CPU, keys and values:
    the bound, what has to fit, and the lowest and the negative highest exponent.

    Args:
        largest: magnitudes that have to fit, FP64 `[layers, 2]` on the CPU; None for the bounds.
    """
    seen = torch.stack(_of_each(layers)).cpu()  # [layers, 2, 5]
    bounds, moved = seen[..., 0], seen[..., 1:].unflatten(-1, (2, 2)).tolist()
    limits = torch.tensor(
        [[(side.low, -side.high) for side in map(_limits, both)] for both in moved],
        dtype=torch.float64,
    )  # [layers, 2, 2]
    fits = bounds if largest is None else largest
    table = torch.cat([torch.stack([bounds, fits], -1), limits], -1)
    return table.nan_to_num(nan=math.inf, posinf=math.inf)


def _of_each(layers: Sequence[AttentionLayer]) -> list[torch.Tensor]:
    """`_bounds_and_moved` of each; on a CPU by as many threads as torch has."""
    if layers[0].input_norm.device.type != "cpu":
        return [_bounds_and_moved(layer) for layer in layers]
    # A pool per call: one that is kept would hang in a forked child.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(_bounds_and_moved, layers))


@torch.no_grad()
def _bounds_and_moved(layer: AttentionLayer) -> torch.Tensor:
    """Of keys and of values: the bound, then smallest and largest magnitude (`magnitudes`) of what goes
    down and of what goes up. FP64 `[2, 5]`, on the device of the weights.
    """
    bounds = torch.stack([layer.key_bound(), layer.value_bound()])
    parts = (layer.keys_down, layer.queries_up, layer.values_down, layer.output_up)
    moved = torch.stack([magnitudes(one).to(bounds.device) for one in parts])  # [4, 2]
    return torch.cat([bounds[:, None], moved.view(2, 4)], 1)


def _limits(moved: list[list[float]]) -> ExponentRange:
    down, up = (exact_range(*one) for one in moved)
    return -down & up


def _side(row: Sequence[float], room: float, has_largest: bool) -> Side:
    bound, fits, low, minus_high = row
    wanted = smallest_exponent(fits * room, FP8_MAX) if 0 < fits < math.inf else 0
    exponent = ExponentRange(int(low), int(-minus_high)).nearest(wanted)
    return Side(exponent, bound, fits if has_largest else None)
