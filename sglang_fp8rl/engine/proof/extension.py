"""`GET /fp8rl/fingerprint`: what is served, as one number per checkpoint name.

Every rank of a scheduler's group serves the request, so they compare and add up what they hold in it: each box
counts once, its replicas are compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import torch

from ...config import Options
from ...errors import RefitError
from ...numerics.fingerprint import MASK, is_on_blocks, plain_number, scaled_number
from ...numerics.grid import ScaleGranularity, granularity_of
from ...wire.fingerprint import FINGERPRINT_PATH, Fingerprint, Number, compare, form_of
from ...wire.plan import FP8
from ..extension import Extension
from ..host.boundary import Boundary
from ..host.request_checks import check_weights_are_there
from ..host.status import internal_states, not_served, refused, replica_of
from ..interception.writes import Region
from ..model.landings import Known
from ..model.parameters import Target, matrices
from ..refit import ModelRefit

_TAKEN_APART = "its loader does more than copy boxes of it"
_MOVING = "SGLang may move its experts while it serves"


@dataclass(frozen=True)
class HeldBox:
    """One box of a checkpoint tensor on one rank.

    Attributes:
        form: of the name's number (`wire.fingerprint.form_of`).
        box: of the full tensor.
        value: its part of the number.
        place: the parameter it lies in.
    """

    form: str
    box: Region
    value: int
    place: str


@dataclass
class Held:
    """What one rank holds of one name; `reason` is why a part of it has no number."""

    shape: tuple[int, ...]
    boxes: list[HeldBox] = field(default_factory=list)
    reason: str = ""


@dataclass
class Rank:
    """What one rank brings; `error` if it could not read its part."""

    held: dict[str, Held] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    error: str = ""


def rank_of(refit: ModelRefit) -> Rank:
    """What this rank holds.

    Weights that SGLang derived from others are derived again and compared; what was stale is put
    right by that.
    """
    known = refit.learned_names().known
    # Derived from the weights as they are served, which those of the trainer are not.
    stale = refit.derived.renewed(list(known))
    with refit.unfolded():
        return Rank({name: _held(name, one, refit.options) for name, one in known.items()}, stale)


def fingerprint_of_ranks(ranks: Sequence[Rank]) -> Fingerprint:
    """The fingerprint of a model over all its ranks.

    Raises:
        RefitError: one could not read its part.
    """
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


def _held(name: str, known: Known, options: Options) -> Held:
    held = Held(known.shape, reason="" if known.landings else known.reason)
    seen = set()
    for landing in known.landings:
        for box, region in zip(landing.boxes, landing.regions, strict=True):
            key = (id(landing.target), box, region)
            if key in seen:
                continue
            seen.add(key)
            if box is None or region is None:
                held.reason = _TAKEN_APART
            elif not landing.target.is_repeatable:
                held.reason = _MOVING
            else:
                found = _number(name, known.shape, landing.target, box, region, options)
                if isinstance(found, str):
                    held.reason = found
                else:
                    held.boxes.append(found)
    return held


def _number(
    name: str,
    shape: tuple[int, ...],
    target: Target,
    box: Region,
    region: Region,
    options: Options,
) -> HeldBox | str:
    """The box's number, or why it has none."""
    if _without_ones(box.shape) != _without_ones(region.shape):
        return _TAKEN_APART
    served = target.parameter.data[_slices(region)]
    if not target.is_fp8:
        form = form_of(str(served.dtype).removeprefix("torch."))
        value = plain_number(name, served.reshape(box.shape), shape, box.start)
        return HeldBox(form, box, value, target.name)
    granularity = granularity_of(target.granularity, options.weight_block_size)
    block = granularity.block(target.parameter.shape)
    if not is_on_blocks(box.start, block):
        return "it starts inside a block of the tensor it is a part of"
    value = 0
    try:
        for start, codes, scales in _matrices(name, target, box, region, granularity):
            value += scaled_number(name, codes, scales, shape, start, block)
    except RefitError as error:  # of what no cast would write either
        return error.rule
    return HeldBox(form_of(FP8, block), box, value & MASK, target.name)


def _matrices(
    name: str, target: Target, box: Region, region: Region, granularity: ScaleGranularity
) -> Iterator[tuple[tuple[int, ...], torch.Tensor, torch.Tensor]]:
    """Where each matrix of the box starts, its codes and its scales."""
    codes = matrices(target.parameter.data[_slices(region)])
    scales = target.scales_of(name, region, granularity)
    for expert, (one, of_one) in enumerate(zip(codes, scales, strict=True)):
        start = (box.start[0] + expert, *box.start[1:]) if len(box.start) == 3 else box.start
        yield start, one, of_one


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(region.start, region.shape, strict=True))


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


FINGERPRINT_MARK = "fp8rl-fingerprint"
_ANSWER, _ERROR = "fp8rl_fingerprint", "fp8rl_fingerprint_error"


async def serve_fingerprint(request: Any) -> Any:
    """It makes derived weights anew: for those who may change the server."""
    from starlette.responses import JSONResponse

    states = await internal_states(FINGERPRINT_MARK)
    for state in states:
        if _ERROR in state:
            return refused(state[_ERROR], HTTPStatus.CONFLICT)
        if _ANSWER not in state:
            return not_served()
    return JSONResponse(
        of_replicas({state["replica"]: json.loads(state[_ANSWER]) for state in states})
    )


def of_replicas(documents: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """One document of a server's data-parallel replicas: that of rank 0, with what others differ in.

    Args:
        documents: by data-parallel rank; they answer in any order.
    """
    first, *others = (
        Fingerprint.from_dict(document, f"dp_rank {rank}")
        for rank, document in sorted(documents.items())
    )
    differing, unproven = dict(first.differing), dict(first.unproven)
    for other in others:
        difference = compare(first, other)
        for name, text in {**difference.differing, **difference.missing}.items():
            differing.setdefault(name, text)
        for name, text in other.unproven.items():
            unproven.setdefault(name, f"{other.source}: {text}")
    numbers = {name: one for name, one in first.numbers.items() if name not in unproven}
    return Fingerprint("server", numbers, differing, unproven).as_dict()


class Fingerprints(Extension):
    """Answers what its model holds."""

    routes = {FINGERPRINT_PATH: serve_fingerprint}  # noqa: RUF012
    mark = FINGERPRINT_MARK

    def answer(self, scheduler: Any) -> dict[str, Any]:
        boundary = Boundary(scheduler.weight_updater.tp_cpu_group)
        own = boundary.step(_read, self.refit, scheduler.weight_updater)
        ranks = boundary.gathered(own or Rank(error=" | ".join(boundary.errors)))
        return boundary.step(_answer, ranks, scheduler) or {_ERROR: " | ".join(boundary.errors)}


def _read(refit: ModelRefit, manager: Any) -> Rank:
    """What this rank has to say. Raises `HostError` while the weights' memory is released."""
    check_weights_are_there(manager, "a fingerprint reads every weight")
    return rank_of(refit)


def _answer(ranks: list[Rank], scheduler: Any) -> dict[str, Any]:
    """As text, for it is pickled between processes and large."""
    found = fingerprint_of_ranks(ranks)
    return {_ANSWER: json.dumps(found.as_dict()), "replica": replica_of(scheduler)}
