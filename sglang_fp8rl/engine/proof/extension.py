"""`GET /fp8rl/fingerprint`: what is served, as one number per checkpoint name.

Every rank of a scheduler's group serves the request, so they compare and add up what they hold in it: each box
counts once, its replicas are compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.responses import JSONResponse

from ...errors import Fp8RlError
from ...numerics.fingerprint import MASK, Box, NumberTable, scaled_boxes, seed_of
from ...wire.fingerprint import FINGERPRINT_PATH, Fingerprint, Number, compare, form_of
from ...wire.plan import FP8
from ..extension import Extension
from ..host.boundary import Boundary
from ..host.status import internal_states, not_served, refused, replica_of
from ..host.update_request import check_weights_are_there
from ..interception import Region
from ..model.landings import Known
from ..model.parameters import Target


class HeldBox(NamedTuple):
    """One box of a checkpoint tensor on one rank.

    Attributes:
        form: of the name's number (`wire.fingerprint.form_of`).
        box: of the full tensor.
        place: the parameter it lies in.
        value: its part of the number, once it was read.
    """

    form: str
    box: Region
    place: str
    value: int = 0


@dataclass
class Held:
    """What one rank holds of one name; `reason` is why a part of it has no number."""

    shape: tuple[int, ...]
    boxes: list[HeldBox] = field(default_factory=list)
    reason: str = ""


@dataclass
class Rank:
    """What one rank brings: of each name what it holds, derived weights that were stale, and what can't be explained."""

    held: dict[str, Held] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    unproven: dict[str, str] = field(default_factory=dict)


def fingerprint_of_ranks(ranks: Sequence[Rank]) -> Fingerprint:
    """The fingerprint of a model over all its ranks: every box once, its replicas compared."""
    numbers: dict[str, Number] = {}
    differing: dict[str, str] = {}
    unproven: dict[str, str] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank.held):
        held = {at: rank.held[name] for at, rank in enumerate(ranks) if name in rank.held}
        boxes, difference = _distinct(held)
        reason = _why_unproven(held, boxes)
        if reason:
            unproven[name] = reason
            continue
        numbers[name] = Number(boxes[0].form, sum(one.value for one in boxes) & MASK)
        if difference:
            differing[name] = difference
    for at, rank in enumerate(ranks):
        unproven |= {place: f"tp_rank {at}: {why}" for place, why in rank.unproven.items()}
        for place in rank.stale:
            differing.setdefault(
                place,
                f"on tp_rank {at} it was not what SGLang derives from the weights that are served; "
                "it has been derived again",
            )
    return Fingerprint("server", numbers, differing, unproven)


def _distinct(held: dict[int, Held]) -> tuple[list[HeldBox], str]:
    """Every box once, and in words where a replica of one is not like the first."""
    boxes: dict[tuple[str, Region], tuple[int, HeldBox]] = {}
    differences = []
    for rank, one in held.items():
        for box in one.boxes:
            holder, first = boxes.setdefault((box.form, box.box), (rank, box))
            if first.value != box.value:
                differences.append(
                    f"tp_rank {rank} ({box.place}) and tp_rank {holder} ({first.place}) hold other "
                    f"bytes of {box.box}"
                )
    return [box for _, box in boxes.values()], "; ".join(differences)


def _why_unproven(held: dict[int, Held], boxes: list[HeldBox]) -> str:
    """Why these boxes make no number of the tensor; empty where they do."""
    for rank, one in held.items():
        if one.reason:
            return f"tp_rank {rank}: {one.reason}"
    if not boxes:
        return "no rank holds any of it"
    forms = {one.form for one in boxes}
    if len(forms) > 1:
        return f"served in several forms: {', '.join(sorted(forms))}"
    count = sum(one.box.numel for one in boxes)
    total = math.prod(next(iter(held.values())).shape)
    if count != total:
        return f"the parts that ranks hold have {count} values, the tensor has {total}"
    return ""


def _held(name: str, known: Known) -> tuple[Held, list[list[Box]]]:
    """What this rank holds of a name, and of each `HeldBox` where to read it."""
    held, memory = Held(known.shape, reason="" if known.landings else known.reason), []
    places = {
        (id(landing.target), box, region): landing.target
        for landing in known.landings
        for box, region in zip(landing.boxes, landing.regions, strict=True)
    }
    for (_, box, region), target in places.items():
        if box is None or region is None or _without_ones(box.shape) != _without_ones(region.shape):
            held.reason = "its loader does more than copy boxes of it"
        elif not target.is_repeatable:
            held.reason = "SGLang may move its experts while it serves"
        elif not region.lies_in(target.parameter.shape):
            held.reason = "between updates SGLang keeps it in another layout"
        else:
            try:
                form, boxes = _memory_of(name, known.shape, target, box, region)
            except Fp8RlError as error:  # of what no cast would write either
                held.reason = error.rule
            else:
                held.boxes.append(HeldBox(form, box, target.name))
                memory.append(boxes)
    return held, memory


def _memory_of(
    name: str, shape: tuple[int, ...], target: Target, box: Region, region: Region
) -> tuple[str, list[Box]]:
    """The form of a box that is served, and the bytes that are its number's."""
    served = target.parameter.data[region.slices].reshape(box.shape)
    if target.format is None:
        form = form_of(str(served.dtype).removeprefix("torch."))
        return form, [Box(served, shape, box.start, seed_of(name))]
    block = target.format.grid(target.parameter.shape).block
    scales = target.scales_of(name, region)
    return form_of(FP8, block), scaled_boxes(name, served, scales, shape, box.start, block)


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


_MARK, _ANSWER, _ERROR = "fp8rl-fingerprint", "fp8rl_fingerprint", "fp8rl_fingerprint_error"


async def serve_fingerprint(request: Any) -> Any:
    """It makes derived weights anew: for those who may change the server."""
    states = await internal_states(_MARK)
    for state in states:
        if _ERROR in state:
            return refused(state[_ERROR], HTTPStatus.CONFLICT)
        if _ANSWER not in state:
            return not_served()
    documents = {state["replica"]: json.loads(state[_ANSWER]) for state in states}
    return JSONResponse(of_replicas(documents))


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
    """Answers what a model holds; takes no part in its updates.

    Attributes:
        made: what this rank holds of every name, without values, and the table of these, in that order; before
            them what both are right for.
    """

    admin_routes = {FINGERPRINT_PATH: serve_fingerprint}  # noqa: RUF012
    mark = _MARK
    made: tuple[tuple, dict[str, Held], NumberTable] | None = None

    def answer(self, scheduler: Any, asked: str) -> dict[str, Any]:
        boundary = Boundary(scheduler.weight_updater.tp_cpu_group)
        own = boundary.step(self._read, scheduler.weight_updater)
        ranks, failures = boundary.gathered(own), boundary.failures()
        found = None if failures else boundary.step(_answer, ranks, scheduler)
        return found or {_ERROR: " | ".join(failures or boundary.errors)}

    def _read(self, manager: Any) -> Rank:
        """What this rank has to say. Raises `HostError` while the weights' memory is released."""
        check_weights_are_there(manager, "a fingerprint reads every weight")
        return self.rank()

    def rank(self) -> Rank:
        """What this rank holds.

        Weights that SGLang derived from others are derived again and compared; what was stale is put
        right by that.
        """
        refit = self.refit
        known = refit.learned_names().known
        # Derived from the weights as they are served, which those of the trainer are not.
        stale = refit.derived.renewed(list(known))
        with refit.unfolded():
            held, table = self._laid_out(known)
            values = iter(table.numbers())  # of all at once: a GPU is waited for once
        read = {
            name: replace(one, boxes=[box._replace(value=next(values)) for box in one.boxes])
            for name, one in held.items()
        }
        return Rank(read, stale, refit.derived.kept_copies.unproven)

    def _laid_out(self, known: Mapping[str, Known]) -> tuple[dict[str, Held], NumberTable]:
        """Made once: as long as memory stays where it is, the next request reads the same places."""
        places = [
            (one.parameter.data_ptr(), one.scale.data_ptr() if one.scale is not None else 0, one.is_repeatable)
            for one in self.refit.targets.values()
        ]  # fmt: skip
        valid_for = (known, sum(len(one.landings) for one in known.values()), places)
        if self.made is None or self.made[0] != valid_for:
            held, to_read = dict[str, Held](), list[list[Box]]()
            for name, one in known.items():
                held[name], memory = _held(name, one)
                to_read += memory
            self.made = valid_for, held, NumberTable(to_read)
        return self.made[1:]


def _answer(ranks: list[Rank], scheduler: Any) -> dict[str, Any]:
    """As text, for it is pickled between processes and large."""
    found = fingerprint_of_ranks(ranks)
    return {_ANSWER: json.dumps(found.as_dict()), "replica": replica_of(scheduler)}
