"""Exponents from what has to fit into e4m3, within what weights can be moved by: the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import RefitError
from ...numerics.powers_of_two import exact_range, magnitudes, smallest_exponent
from ...numerics.reference import FP8_MAX
from ..host.boundary import Boundary
from .attention_layers import AttentionLayer

# By mode, what a larger value than the largest that is known may be of it; None where bounds have to fit.
# Calibrated: a binade, as other text, and later positions, may have larger values.
ROOM = {"certified": None, "sent": 1.0, "calibrated": 2.0}


@dataclass(frozen=True)
class Choice:
    """For each layer, of keys and of values; all are `[layers, 2]`, on the CPU.

    Attributes:
        exponents: int64 `e`; `x * 2**-e` is stored.
        bounds: FP64, on `|x|`, from the weights; inf where they are not finite.
        largest: FP64, measured or announced; inf where nothing was, NaN where the bounds had to fit.
    """

    exponents: torch.Tensor
    bounds: torch.Tensor
    largest: torch.Tensor

    def certified(self) -> torch.Tensor:
        """Whether nothing that is stored can exceed e4m3's largest number."""
        return self.bounds <= torch.ldexp(torch.tensor(FP8_MAX).double(), self.exponents)


def chosen(group: Any, read: Callable[[], torch.Tensor], room: float | None) -> Choice:
    """The smallest exponents with which `largest * room` fits; 0 where it is not known.

    A collective: ranks hold different heads, and one exponent is for all of them.

    Args:
        group: the ranks that share a layer's heads, on a backend for CPU tensors.
        read: unfolds the weights of this rank, and returns `table_of` them.
        room: of `ROOM`.

    Raises:
        RefitError: a rank could not read; on every rank.
    """
    boundary = Boundary(group)
    table = boundary.step(read)
    errors = boundary.failures()
    if table is None or errors:
        raise RefitError(
            "the scales of the KV cache",
            " | ".join(errors),
            "one exponent is for all ranks, so each has to read its weights",
            "The server's log says more. Send all weights again.",
        )
    torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX, group=group)
    exponents = [_exponent(row, room or 1.0) for row in table.flatten(0, 1).tolist()]
    bounds, fits = table[..., 0], table[..., 1]
    largest = torch.full_like(fits, math.nan) if room is None else fits
    return Choice(torch.tensor(exponents).view(-1, 2), bounds, largest)


def _exponent(row: Sequence[float], room: float) -> int:
    _, fits, minus_least_down, most_down, minus_least_up, most_up = row
    wanted = smallest_exponent(fits * room, FP8_MAX) if 0 < fits < math.inf else 0
    lowest_down, highest_down = exact_range(-minus_least_down, most_down)
    lowest_up, highest_up = exact_range(-minus_least_up, most_up)
    return min(max(wanted, -highest_down, lowest_up), -lowest_down, highest_up)


@torch.no_grad()
def table_of(layers: Sequence[AttentionLayer], largest: torch.Tensor | None = None) -> torch.Tensor:
    """What exponents are chosen from, of unfolded weights. FP64 `[layers, 2, 6]` on the CPU, keys and values:
    the bound, what has to fit, and of what goes down and of what goes up the negative smallest and the
    largest magnitude. Of several ranks the largest number counts.

    Args:
        largest: magnitudes that have to fit, FP64 `[layers, 2]` on the CPU; None for the bounds.
    """
    table = torch.stack([_rows_of(layer) for layer in layers]).cpu()
    if largest is not None:
        table[..., 1] = largest
    return table.nan_to_num(math.inf, math.inf, -math.inf)


def _rows_of(layer: AttentionLayer) -> torch.Tensor:
    """Of the table, with the bounds as what has to fit; on the device of the weights."""
    bounds = layer.bounds()[:, None]
    moved = torch.stack([magnitudes(one).to(bounds) for one in (*layer.down, *layer.up)])  # [4, 2]
    moved[:, 0].neg_()
    down, up = moved.view(2, 2, 2)
    return torch.cat([bounds, bounds, down, up], 1)
