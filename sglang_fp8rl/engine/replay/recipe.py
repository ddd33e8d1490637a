"""How a bucket of one layout is written without its loaders: one table of casts and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from ...config import Options
from ...numerics.runners import TableRunner, make_runner
from ...numerics.write_table import ROW_FIELDS, CastTable, Piece, Row, as_rows
from ...scheme import Granularity
from ..arrival.bucket import Bucket, FlatBucket
from ..interception.region import Region
from ..model.parameters import Target
from ..native.recording import RecordedPair, RecordedPiece, Recording
from ..report.report import RefitReport
from .recipe_pieces import pairs_of, pieces_of
from .recipe_rows import plain_rows

_SAMPLES = 4
# A write, with its codes and scales.
Sample = tuple[RecordedPiece, tuple[torch.Tensor, torch.Tensor]]

_NOTHING, _NO_ROWS = np.empty(0, np.int64), np.empty((0, ROW_FIELDS), np.int64)


@dataclass
class Recipe:
    """How a bucket of one layout is written.

    Attributes:
        layout, nbytes: of the bucket it was recorded from.
        numbers: of its names.
        is_taken: whether any of them reached a parameter.
        layout_number: of all its tensors together (`wire/refit_note.py`).
        positions: per piece of the table, the tensor it is from.
        singly: writes that the kernels don't know, done one by one.
        native: positions that take the native path, with the reason.
        samples: writes to measure the SQNR on, with their codes and scales.
        owners: parameters, and where they were.
        exponents: positions of scales that have to be powers of two.
        metadata: of a flattened bucket.
    """

    layout: tuple[list, ...]
    nbytes: int
    numbers: np.ndarray
    is_taken: bool
    layout_number: int
    positions: np.ndarray
    runner: TableRunner
    singly: list[RecordedPiece]
    native: dict[int, str]
    regions: np.ndarray
    targets: np.ndarray
    samples: list[Sample]
    owners: list[tuple[torch.nn.Parameter, int]]
    exponents: tuple[int, ...] = ()
    metadata: Sequence[Any] = ()

    def fits(self, bucket: Bucket) -> bool:
        """Whether the bucket has this layout, and the parameters are where they were."""
        return bucket.layout == self.layout and all(
            parameter.data_ptr() == address for parameter, address in self.owners
        )

    @property
    def size(self) -> int:
        return len(self.numbers)


class _Builder:
    """Collects what the recorded writes become: rows of a table, or writes done one by one."""

    def __init__(self, recording: Recording, report: RefitReport, options: Options) -> None:
        self._bucket, self._coverage, self._options = recording.bucket, report.coverage, options
        self.pairs, self.native = pairs_of(recording)
        self._rows = [_NO_ROWS]
        self._positions = [_NOTHING]
        self._regions = [_NOTHING]
        # What is not in columns, row by row.
        self._single_rows: list[Row] = []
        self._single_positions: list[int] = []
        self._single_regions: list[int] = []
        self.singly: list[RecordedPiece] = []
        self.samples: list[Sample] = []
        self.owners: dict[int, Target] = {}
        self._sampled: Counter[Granularity] = Counter()
        self._devices: set[torch.device] = set()

    def add_pieces(self, recording: Recording) -> None:
        """The writes of loaders: most of them in columns, the others one by one."""
        pieces, columns = recording.pieces, recording.columns
        for at, region in enumerate(columns.regions):
            if region is None:
                self.native[pieces[at].position] = "it writes what is no box"
        positions, indices = columns.positions, columns.targets
        is_ours = ~np.isin(positions, list(self.native)) if self.native else np.True_
        _, first = np.unique(indices, return_index=True)
        targets = {pieces[at].target.index: pieces[at].target for at in first.tolist()}
        plain = plain_rows(recording, targets, self._options)
        where = np.flatnonzero(plain.is_plain & is_ours)
        self._rows.append(plain.rows[where])
        self._positions.append(positions[where])
        if len(where):
            self._devices |= self._bucket.devices
        ours = np.flatnonzero(np.broadcast_to(is_ours, positions.shape))
        self.owners |= {index: targets[index] for index in np.unique(indices[ours]).tolist()}
        self._add_regions(indices[ours].tolist(), [columns.regions[at] for at in ours.tolist()])
        for at in self._first_of_each_granularity(indices, where):
            self._take_sample(pieces[at], pieces_of(self._bucket, pieces[at], self._options))
        for at in np.flatnonzero(~plain.is_plain & is_ours).tolist():
            self._add_by_views(pieces[at])

    def _add_regions(self, indices: list[int], regions: list[Region | None]) -> None:
        boxes = cast("list[Region]", regions)  # what is no box is native
        self._regions.append(self._coverage.numbers_of(indices, boxes))

    def _first_of_each_granularity(self, indices: np.ndarray, where: np.ndarray) -> Iterator[int]:
        """Of the writes at `where`, the first few of each; `indices` are those of the targets."""
        of_granularity: dict[Granularity, list[int]] = {}
        for index, target in self.owners.items():
            of_granularity.setdefault(target.granularity, []).append(index)
        for those in of_granularity.values():
            yield from where[np.isin(indices[where], those)][:_SAMPLES].tolist()

    def _add_by_views(self, recorded: RecordedPiece) -> None:
        made = pieces_of(self._bucket, recorded, self._options) if recorded.write.shape else []
        if not made or not all(piece.fits() for piece in made):
            self.singly.append(recorded)
            return
        self._take_sample(recorded, made)
        self._add_rows(recorded.target, made, [recorded.position])

    def _take_sample(self, recorded: RecordedPiece, made: list[Piece]) -> None:
        granularity, scales = recorded.target.granularity, made[0].scales
        if scales is None or len(made) > 1 or self._sampled[granularity] >= _SAMPLES:
            return
        self._sampled[granularity] += 1
        self.samples.append((recorded, (made[0].destination, scales)))

    def add_pair(self, pair: RecordedPair, made: list[Piece]) -> None:
        """The copies of an FP8 weight and its scale."""
        self.owners[pair.target.index] = pair.target
        for copy in pair.copies:
            assert copy.write.region is not None
            number = self._coverage.number_of(pair.target.index, copy.write.region)
            self._single_regions.append(number)
        self._add_rows(pair.target, made, [pair.scale, pair.weight])

    def _add_rows(self, target: Target, made: list[Piece], positions: list[int]) -> None:
        self._devices.add(target.parameter.device)
        self._single_rows += [piece.row() for piece in made]
        self._single_positions += positions * (len(made) // len(positions))

    @property
    def positions(self) -> np.ndarray:
        """Per row, the tensor it is from."""
        return np.concatenate([*self._positions, np.array(self._single_positions, np.int64)])

    @cached_property
    def regions(self) -> np.ndarray:
        """Numbers of all boxes that are written."""
        return np.concatenate([*self._regions, np.array(self._single_regions, np.int64)])

    def runner(self) -> TableRunner | None:
        """None where the table can't run: nobody's device, several, or boxes that overlap."""
        devices = self._devices
        if self._coverage.overlap(self.regions) or len(devices) > 1:
            return None
        memory = [(target.parameter, target.scale) for target in self.owners.values()]
        kept = tuple(tensor for both in memory for tensor in both if tensor is not None)
        return make_runner(
            CastTable.of_rows(np.concatenate([*self._rows, as_rows(self._single_rows)]), kept),
            devices.pop() if devices else torch.device("cpu"),
            pow2_scale=self._options.use_weight_pow2_scale,
            round_to_bf16=self._options.round_to_bf16,
        )


def recipe_of(
    recording: Recording, report: RefitReport, is_taken: bool, options: Options
) -> Recipe | None:
    """The recipe that a successful call was recorded for; None if it can't be replayed at all."""
    bucket, names = recording.bucket, recording.bucket.names
    if -1 in recording.refused:
        return None
    built = _Builder(recording, report, options)
    built.add_pieces(recording)
    for pair, made in built.pairs:
        if pair.weight not in built.native:
            built.add_pair(pair, made)
    runner = built.runner()
    if runner is None:
        return None
    parameters = [target.parameter for target in built.owners.values()]
    return Recipe(
        layout=bucket.layout,
        nbytes=bucket.nbytes,
        numbers=report.brought.numbers_of(names),
        is_taken=is_taken,
        layout_number=bucket.layout_number,
        positions=built.positions,
        runner=runner,
        singly=built.singly,
        native=built.native,
        regions=built.regions,
        targets=np.array(sorted(built.owners), np.int64),
        samples=built.samples,
        owners=[(parameter, parameter.data_ptr()) for parameter in parameters],
        exponents=tuple(
            pair.scale
            for pair, made in built.pairs
            if made and pair.weight not in built.native and pair.target.takes_packed_scales
        ),
        metadata=bucket.metadata if isinstance(bucket, FlatBucket) else (),
    )
