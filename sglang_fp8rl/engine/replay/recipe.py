"""How a bucket of one layout is written without its loaders: one table of casts and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...config import Options
from ...numerics.runners import TableRunner, make_runner
from ...numerics.write_table import CastTable, Piece, Row
from ...scheme import Granularity
from ..arrival.bucket import Bucket, FlatBucket
from ..model.parameters import Target
from ..native.recording import RecordedPair, RecordedPiece, Recording
from ..report.report import RefitReport
from .recipe_pieces import pairs_of, pieces_of
from .recipe_rows import TableRows

_SAMPLES = 4


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
        metadata: of a flattened bucket.
    """

    layout: tuple[list, ...]
    nbytes: int
    numbers: np.ndarray
    is_taken: bool
    layout_number: int
    positions: list[int]
    runner: TableRunner
    singly: list[RecordedPiece]
    native: dict[int, str]
    regions: np.ndarray
    targets: np.ndarray
    samples: list[tuple[RecordedPiece, tuple[torch.Tensor, torch.Tensor]]]
    owners: list[tuple[torch.nn.Parameter, int]]
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
        self.rows: list[Row] = []
        self.positions: list[int] = []
        self.singly: list[RecordedPiece] = []
        self.regions: list[int] = []
        self.samples: list[tuple[RecordedPiece, tuple[torch.Tensor, torch.Tensor]]] = []
        self.owners: dict[int, Target] = {}
        self.devices: set[torch.device] = set()
        self._fast = TableRows(self._bucket, options)
        self._sampled: Counter[Granularity] = Counter()

    def add_piece(self, recorded: RecordedPiece) -> None:
        """One write of a loader."""
        target, region = recorded.target, recorded.write.write.region
        if region is None:
            self.native[recorded.position] = "it writes what is no box"
            return
        self.owners[target.index] = target
        self.regions.append(self._coverage.number_of(target.index, region))
        wants_sample = self._sampled[target.granularity] < _SAMPLES
        row = None if wants_sample else self._fast.row(recorded)
        if row is not None:
            self.devices.add(target.parameter.device)
            self.rows.append(row)
            self.positions.append(recorded.position)
            return
        made = pieces_of(self._bucket, recorded, self._options) if recorded.write.shape else []
        if not made or not all(piece.fits() for piece in made):
            self.singly.append(recorded)
            return
        scales = made[0].scales
        if scales is not None and len(made) == 1 and wants_sample:
            self._sampled[target.granularity] += 1
            self.samples.append((recorded, (made[0].destination, scales)))
        self._add_rows(target, made, [recorded.position])

    def add_pair(self, pair: RecordedPair, made: list[Piece]) -> None:
        """The copies of an FP8 weight and its scale."""
        self.owners[pair.target.index] = pair.target
        for copy in pair.copies:
            assert copy.write.region is not None
            self.regions.append(self._coverage.number_of(pair.target.index, copy.write.region))
        self._add_rows(pair.target, made, [pair.scale, pair.weight])

    def _add_rows(self, target: Target, made: list[Piece], positions: list[int]) -> None:
        self.devices.add(target.parameter.device)
        self.rows += [piece.row() for piece in made]
        self.positions += positions * (len(made) // len(positions))

    def runner(self) -> TableRunner | None:
        """None where the table can't run: nobody's device, several, or boxes that overlap."""
        if self._coverage.overlap(np.array(self.regions, np.int64)) or len(self.devices) > 1:
            return None
        memory = [(target.parameter, target.scale) for target in self.owners.values()]
        kept = tuple(tensor for both in memory for tensor in both if tensor is not None)
        return make_runner(
            CastTable.of_rows(self.rows, kept),
            self.devices.pop() if self.devices else torch.device("cpu"),
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
    for recorded in recording.pieces:
        if recorded.position not in built.native:
            built.add_piece(recorded)
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
        regions=np.array(built.regions, np.int64),
        targets=np.array(sorted(built.owners), np.int64),
        samples=built.samples,
        owners=[(parameter, parameter.data_ptr()) for parameter in parameters],
        metadata=bucket.metadata if isinstance(bucket, FlatBucket) else (),
    )
