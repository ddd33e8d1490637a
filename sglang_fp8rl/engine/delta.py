"""Changed blocks of FP8 weights, applied in place: `NAME.fp8rl_delta` (see `delta_format`).

A delta carries the digest of every block of the resulting weight. Each rank compares the blocks it
serves and those it was sent with them, and all ranks agree, *before* any of them writes: a weight that
is not what the trainer thinks it is stays as it was, and the call fails asking for a full refit.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..delta_format import DELTA_SUFFIX, FULL_REFIT_WANTED, Delta, unpack
from ..errors import RefitError
from ..numerics.blocks import block_digests, digests_of_blocks, write_blocks
from ..scheme import Granularity
from .coverage import Region
from .names import Landing, NameTable
from .pairs import check_numbers
from .quantize import scales_of
from .report import RefitReport

_REMEDY = (
    f"The server was restarted, or updated by someone else: {FULL_REFIT_WANTED} "
    "(SentState.forget(), or full_on_mismatch=True)."
)


def split_deltas(
    named_tensors: Any,
) -> tuple[dict[str, torch.Tensor], list[tuple[str, torch.Tensor]]]:
    """The deltas of a bucket, by their weights' names, and the other tensors."""
    deltas: dict[str, torch.Tensor] = {}
    others = []
    for name, tensor in named_tensors:
        if name.endswith(DELTA_SUFFIX):
            deltas[name.removesuffix(DELTA_SUFFIX)] = tensor
        else:
            others.append((name, tensor))
    return deltas, others


@dataclass(frozen=True)
class _Place:
    """One box of a weight that this rank serves.

    Attributes:
        codes, scales: views of the served parameters.
        rows, columns: of the block grid.
    """

    landing: Landing
    region: Region
    codes: torch.Tensor
    scales: torch.Tensor
    rows: slice
    columns: slice


@dataclass(frozen=True)
class _Ready:
    """The delta of one weight, verified on this rank."""

    delta: Delta
    places: list[_Place]
    block: tuple[int, int]


class DeltaLoader:
    """Applies the deltas of one model.

    Args:
        names: where each name lands.
        block_size: of blockwise weights.
    """

    def __init__(self, names: NameTable, report: RefitReport, block_size: tuple[int, int]) -> None:
        self._names, self._report, self._block_size = names, report, block_size

    def apply(
        self,
        deltas: Mapping[str, torch.Tensor],
        plan: Mapping[str, dict[str, Any]],
        passed_over: Container[str],
    ) -> dict[str, str]:
        """Verify and write deltas, weight by weight. Every tensor-parallel rank has to call this
        with the same ones.

        Args:
            deltas: packed, by the names of their weights.
            plan: of the model, by name.
            passed_over: weights that live on other ranks.

        Returns:
            By name, what kept a weight from being written on every rank.
        """
        problems: dict[str, str] = {}
        ready: dict[str, _Ready] = {}
        for name, packed in deltas.items():
            if name in passed_over:
                continue
            try:
                ready[name] = self._verified(name, packed, plan.get(name))
            except RefitError as error:
                # Not to go on with this weight: it is reported, and written on no rank.
                problems[name] = str(error)
        for name in _refused_elsewhere(list(deltas), problems):
            problems[name] = f"{name}: refused by another tensor-parallel rank; {_REMEDY}"
        for name, verified in ready.items():
            if name not in problems:
                self._write(verified)
        return problems

    def _verified(self, name: str, packed: torch.Tensor, entry: dict[str, Any] | None) -> _Ready:
        known = self._names.known.get(name)
        if known is None or entry is None or "scale" not in entry["wire"]:
            raise RefitError(
                name + DELTA_SUFFIX,
                "a delta for a weight that is not FP8 on the wire",
                "deltas are blocks of codes and scales",
                f"Follow this server's plan; {FULL_REFIT_WANTED}.",
            )
        is_blockwise = entry["scheme"] == Granularity.BLOCKWISE.value
        block = self._block_size if is_blockwise else (1, known.shape[1])
        grid = (entry["wire"]["scale_shape"][0], entry["wire"]["scale_shape"][1])
        places = [place for one in known.landings for place in self._places(name, one, block)]
        device = known.landings[0].target.parameter.device
        delta = unpack(name, packed.to(device), grid, block)
        _check_digests(name, delta, places, block)
        check_numbers(delta.blocks, delta.scale, name + DELTA_SUFFIX, name + DELTA_SUFFIX)
        return _Ready(delta, places, block)

    def _write(self, ready: _Ready) -> None:
        delta = ready.delta
        for place in ready.places:
            row, column, which = _inside(delta, place)
            write_blocks(place.codes, row, column, delta.blocks[which], ready.block)
            place.scales[row, column] = delta.scale[which]
            self._report.written(place.landing.target, place.region)

    def _places(self, name: str, landing: Landing, block: tuple[int, int]) -> Iterator[_Place]:
        target = landing.target
        assert target.scale is not None
        for box, region in zip(landing.boxes, landing.regions, strict=True):
            assert box is not None  # or the plan would not have it as FP8 on the wire
            assert region is not None
            codes, scales = target.parameter.data, target.scale.data
            if codes.dim() == 3:
                codes, scales = codes[region.start[0]], scales[region.start[0]]
            (row, column), (height, width) = region.start[-2:], region.shape[-2:]
            rows, columns = (
                slice(at // step, -(-(at + size) // step))
                for at, size, step in zip(box.start, box.shape, block, strict=True)
            )
            yield _Place(
                landing,
                region,
                codes[row : row + height, column : column + width],
                scales_of(target, name, region, scales, self._block_size),
                rows,
                columns,
            )


def _check_digests(name: str, delta: Delta, places: list[_Place], block: tuple[int, int]) -> None:
    """Raises `RefitError` unless sent blocks and unchanged served ones have their digests."""
    sent = digests_of_blocks(delta.blocks, delta.scale)
    damaged = int((sent != delta.digests.reshape(-1)[delta.index]).sum())
    changed = torch.zeros_like(delta.digests, dtype=torch.bool)
    changed.view(-1)[delta.index] = True
    stale = torch.zeros((), dtype=torch.int64, device=changed.device)
    for place in places:
        served = block_digests(place.codes, place.scales, block)
        differs = served != delta.digests[place.rows, place.columns]
        stale += (differs & ~changed[place.rows, place.columns]).sum()
    if damaged or int(stale):
        what = (
            f"{damaged} sent block(s) do not have the digest that was sent with them"
            if damaged
            else f"{int(stale)} block(s) that were not sent differ from the trainer's"
        )
        raise RefitError(
            name,
            what,
            "a delta is applied to the weight it was made from; nothing of it was written",
            _REMEDY,
        )


def _refused_elsewhere(names: list[str], problems: Mapping[str, str]) -> list[str]:
    """Weights that this rank would write and another would not."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    refused = torch.tensor([name in problems for name in names], dtype=torch.int32)
    if group.world_size > 1:
        torch.distributed.all_reduce(
            refused, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group
        )
    return [
        name
        for name, is_refused in zip(names, refused.tolist(), strict=True)
        if is_refused and name not in problems
    ]


def _inside(delta: Delta, place: _Place) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row and column, in the place's own grid, of the changed blocks in it; and which they are."""
    row, column = delta.index // delta.digests.shape[1], delta.index % delta.digests.shape[1]
    inside = (row >= place.rows.start) & (row < place.rows.stop)
    inside &= (column >= place.columns.start) & (column < place.columns.stop)
    (which,) = torch.nonzero(inside, as_tuple=True)
    return row[which] - place.rows.start, column[which] - place.columns.start, which
