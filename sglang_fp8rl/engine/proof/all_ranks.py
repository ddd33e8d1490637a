"""One number per name from what all ranks hold: each box counts once, its replicas are compared."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...errors import RefitError
from ...numerics.fingerprint import MASK
from ...wire.fingerprint import Fingerprint, Number
from ..interception.region import Region
from ..refit import ModelRefit
from .held_boxes import Held, HeldBox, held_boxes

logger = logging.getLogger(__name__)


def fingerprint_of_model(refit: ModelRefit, group: torch.distributed.ProcessGroup) -> Fingerprint:
    """The fingerprint of a model over all its ranks; a collective, with the same answer on each.

    Weights that SGLang derived from others are derived again and compared; what was stale is put
    right by that.

    Args:
        group: of the ranks that hold the model, on a CPU backend.
    """
    size = torch.distributed.get_world_size(group)
    own = _of_this_rank(refit)
    ranks = [own] * size
    if size > 1:
        torch.distributed.all_gather_object(ranks, own, group=group)
    failed = [f"tp_rank {rank}: {one.error}" for rank, one in enumerate(ranks) if one.error]
    if failed:
        raise RefitError(
            "the fingerprint",
            "; ".join(failed),
            "every rank reads what it holds",
            "The server's log says more.",
        )
    found = joined([one.held for one in ranks])
    differing = dict(found.differing)
    for rank, one in enumerate(ranks):
        for place in one.stale:
            differing.setdefault(
                place,
                f"on tp_rank {rank} it was not what SGLang derives from the weights that are served; "
                "it has been derived again",
            )
    return Fingerprint("server", found.numbers, differing, found.unproven)


@dataclass
class _Rank:
    """What one rank brings; `error` if it could not read its part."""

    held: dict[str, Held] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    error: str = ""


def _of_this_rank(refit: ModelRefit) -> _Rank:
    try:
        refit.plan()  # learns the names of a model that was not loaded from a checkpoint
        stale = refit.derived.renewed(list(refit.names.known))
        return _Rank(held_boxes(refit.names, refit.options), stale)
    except Exception as error:
        # Told to all ranks, which would wait for this one, and raised on each.
        logger.exception("fp8rl: no fingerprint of this rank")
        return _Rank(error=str(error) or type(error).__name__)


def joined(ranks: Sequence[Mapping[str, Held]]) -> Fingerprint:
    """One fingerprint from those of all ranks.

    Args:
        ranks: name to what that rank holds of it, by rank.
    """
    numbers: dict[str, Number] = {}
    differing: dict[str, str] = {}
    unproven: dict[str, str] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        held = [(rank, one[name]) for rank, one in enumerate(ranks) if name in one]
        reason = next((f"tp_rank {rank}: {one.reason}" for rank, one in held if one.reason), "")
        boxes, difference = _distinct(held)
        forms = {form for form, _ in boxes}
        total = math.prod(held[0][1].shape)
        count = sum(box.numel for _, box in boxes)
        if reason or len(forms) > 1 or count != total:
            unproven[name] = reason or (
                f"served in several forms: {', '.join(sorted(forms))}"
                if len(forms) > 1
                else f"the parts that ranks hold have {count} values, the tensor has {total}"
            )
            continue
        value = sum(one.value for one in boxes.values()) & MASK
        numbers[name] = Number(next(iter(forms)), value)
        if difference:
            differing[name] = difference
    return Fingerprint("server", numbers, differing, unproven)


def _distinct(
    held: Sequence[tuple[int, Held]],
) -> tuple[dict[tuple[str, Region], HeldBox], str]:
    """Every box once, and in words where a replica of one is not like the first."""
    boxes: dict[tuple[str, Region], HeldBox] = {}
    holders: dict[tuple[str, Region], int] = {}
    differences = []
    for rank, one in held:
        for box in one.boxes:
            key = (box.form, box.box)
            first = boxes.setdefault(key, box)
            holder = holders.setdefault(key, rank)
            if first.value != box.value:
                differences.append(
                    f"tp_rank {rank} ({box.place}) and tp_rank {holder} ({first.place}) hold other "
                    f"bytes of {box.box}"
                )
    return boxes, "; ".join(differences)
