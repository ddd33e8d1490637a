"""Exponents from what has to fit into e4m3, within what weights can be moved by: the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import RefitError
from ...numerics.kv_bounds import exact_range, magnitudes, smallest_exponent
from ...numerics.reference import FP8_MAX
from ..host.boundary import Boundary
from .attention_layers import AttentionLayer

# By mode, what a larger value than the largest that is known may be of it; None where bounds have to fit.
# Calibrated: a binade, as other text, and later positions, may have larger values.
ROOM = {"certified": None, "sent": 1.0, "calibrated": 2.0}

# Of each layer in turn its keys and its values, as the status has them.
Sides = list[dict[str, Any]]


def chosen(group: Any, read: Callable[[], torch.Tensor], room: float | None) -> Sides:
    """The smallest exponents with which `largest * room` fits; 0 where it is not known.

    A collective of the ranks that share a layer's heads: one exponent is for all of them.

    Args:
        group: theirs, on a backend for CPU tensors.
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
    return [_side(row, room) for row in table.flatten(0, 1).tolist()]


def exponents_of(sides: Sides) -> torch.Tensor:
    """Int64 `[layers, 2]`, keys and values: `x * 2**-e` is stored."""
    return torch.tensor([side["exponent"] for side in sides]).view(-1, 2)


def _side(row: Sequence[float], room: float | None) -> dict[str, Any]:
    """`bound` is on `|x|`, from the weights, and `largest` was measured or announced; None where it is not known.

    `head_room` is binades from `largest`, or else from the bound, to 448; `certified` says that nothing that is
    stored can exceed it.
    """
    bound, fits, minus_least_down, most_down, minus_least_up, most_up = row
    wanted = smallest_exponent(fits * (room or 1.0), FP8_MAX) if _known(fits) else 0
    lowest_down, highest_down = exact_range(-minus_least_down, most_down)
    lowest_up, highest_up = exact_range(-minus_least_up, most_up)
    exponent = min(max(wanted, -highest_down, lowest_up), -lowest_down, highest_up)
    largest = None if room is None else _known(fits)
    used = largest or _known(bound)
    return {
        "exponent": exponent,
        "bound": _known(bound),
        "largest": largest,
        "head_room": used and round(exponent + math.log2(FP8_MAX / used), 3),
        "certified": bound <= math.ldexp(FP8_MAX, exponent),
    }


def _known(value: float) -> float | None:
    return value if 0 < value < math.inf else None


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
