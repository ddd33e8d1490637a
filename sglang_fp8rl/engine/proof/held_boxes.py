"""The fingerprint of what one rank holds, box by box of each checkpoint tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ...config import Options
from ...errors import RefitError
from ...numerics.fingerprint import MASK, is_on_blocks, plain_number, scaled_number
from ...numerics.grid import ScaleGranularity, granularity_of
from ...wire.fingerprint import form_of
from ...wire.plan import FP8
from ..interception.region import Region
from ..model.landings import Known, NameTable
from ..model.parameters import Target
from ..native.cast_write import matrices, scales_of

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


def held_boxes(names: NameTable, options: Options) -> dict[str, Held]:
    """Read every parameter once; the numbers of all names that the model takes.

    Args:
        names: filled by a load or a probe.
    """
    return {name: _held(name, known, options) for name, known in names.known.items()}


def _held(name: str, known: Known, options: Options) -> Held:
    held = Held(known.shape)
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
    """Where each matrix of the box starts, its codes and its scales, of the box's dimensions."""
    assert target.scale is not None
    codes, all_scales = target.parameter.data[_slices(region)], target.scale.data
    if all_scales.dim() == 3:
        all_scales = all_scales[region.start[0] : region.start[0] + region.shape[0]]
    for expert, (one, of_one) in enumerate(zip(matrices(codes), matrices(all_scales), strict=True)):
        scales = scales_of(target, name, region, of_one, granularity)
        if len(box.start) == 3:
            yield (box.start[0] + expert, *box.start[1:]), one.unsqueeze(0), scales.unsqueeze(0)
        else:
            yield box.start, one, scales


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(region.start, region.shape, strict=True))


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]
