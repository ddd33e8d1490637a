"""How a bucket of one layout is written without its loaders: one table of casts and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...config import Options
from ...numerics.finite_copy import as_matrix
from ...numerics.grid import granularity_of
from ...numerics.runners import make_runner
from ...numerics.write_table import CastTable, Kind, Piece, Row
from ...scheme import Granularity
from ..arrival.bucket import Bucket, FlatBucket
from ..model.parameters import Target
from ..native.cast_write import matrices, scales_of
from ..native.recording import RecordedPair, RecordedPiece, Recording
from ..report.report import RefitReport
from .recipe_rows import TableRows

_SAMPLES = 4


@dataclass
class Recipe:
    """How a bucket of one layout is written.

    Attributes:
        layout, nbytes: of the bucket it was recorded from.
        numbers: of its names, and `stored`: of those that a parameter took.
        touched: name to the part of the model it was for.
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
    stored: np.ndarray
    touched: dict[str, tuple]
    positions: list[int]
    runner: Any
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


def recipe_of(
    recording: Recording,
    report: RefitReport,
    touched: dict[str, tuple],
    options: Options,
) -> Recipe | None:
    """The recipe that a successful call was recorded for; None if it can't be replayed at all."""
    bucket = recording.bucket
    names = bucket.names
    if len(set(names)) < len(names) or -1 in recording.refused:
        return None
    pairs, native = _pairs(recording)
    rows: list[Row] = []
    positions: list[int] = []
    fast = TableRows(bucket, options)
    singly: list[RecordedPiece] = []
    regions: list[int] = []
    samples: list[tuple[RecordedPiece, tuple[torch.Tensor, torch.Tensor]]] = []
    owners: dict[int, Target] = {}
    devices: set[torch.device] = set()
    sampled: Counter[Granularity] = Counter()
    for recorded in recording.pieces:
        if recorded.position in native:
            continue
        target, write = recorded.target, recorded.write.write
        if write.region is None:
            native[recorded.position] = "it writes what is no box"
            continue
        owners[target.index] = target
        regions.append(report.coverage.number_of(target.index, write.region))
        wants_sample = sampled[target.granularity] < _SAMPLES
        row = None if wants_sample else fast.row(recorded)
        if row is not None:
            devices.add(target.parameter.device)
            rows.append(row)
            positions.append(recorded.position)
            continue
        made = _pieces(bucket, recorded, options) if recorded.write.shape else []
        if not made or not all(piece.fits() for piece in made):
            singly.append(recorded)
            continue
        scales = made[0].scales
        if scales is not None and len(made) == 1 and wants_sample:
            sampled[target.granularity] += 1
            samples.append((recorded, (made[0].destination, scales)))
        devices.add(target.parameter.device)
        rows += [piece.row() for piece in made]
        positions += [recorded.position] * len(made)
    for pair, made in pairs:
        if pair.weight in native:
            continue
        owners[pair.target.index] = pair.target
        devices.add(pair.target.parameter.device)
        for copy in pair.copies:
            assert copy.write.region is not None
            regions.append(report.coverage.number_of(pair.target.index, copy.write.region))
        rows += [piece.row() for piece in made]
        positions += [pair.scale, pair.weight] * (len(made) // 2)
    found = np.array(regions, np.int64)
    if report.coverage.overlap(found):
        return None
    if len(devices) > 1:
        return None
    memory = [(target.parameter, target.scale) for target in owners.values()]
    kept = tuple(tensor for pair in memory for tensor in pair if tensor is not None)
    runner = make_runner(
        CastTable.of_rows(rows, kept),
        devices.pop() if devices else torch.device("cpu"),
        pow2_scale=options.use_weight_pow2_scale,
        round_to_bf16=options.round_to_bf16,
    )
    if runner is None:
        return None
    replayed = {name for position, name in enumerate(names) if position not in native}
    parts = {name: part for name, part in touched.items() if name in replayed}
    return Recipe(
        layout=bucket.layout,
        nbytes=bucket.nbytes,
        numbers=report.window.numbers_of(names),
        stored=report.window.numbers_of(parts),
        touched=parts,
        positions=positions,
        runner=runner,
        singly=singly,
        native=native,
        regions=found,
        targets=np.array(sorted(owners), np.int64),
        samples=samples,
        owners=[(parameter, parameter.data_ptr()) for parameter, _ in memory],
        metadata=bucket.metadata if isinstance(bucket, FlatBucket) else (),
    )


def _pairs(
    recording: Recording,
) -> tuple[list[tuple[RecordedPair, list[Piece]]], dict[int, str]]:
    """Each pair's pieces, scales and codes in turn; and what stays native, both halves or neither."""
    native = dict(recording.refused)
    for position, count in recording.waiting.items():
        if count:
            native.setdefault(position, "half of an FP8 pair, the other is in another bucket")
    made = [(pair, _pair_pieces(recording.bucket, pair)) for pair in recording.pairs]
    for pair, pieces in made:
        if not pieces:
            native.setdefault(pair.weight, "an FP8 pair that the kernels can't copy")
    while any((pair.weight in native) != (pair.scale in native) for pair, _ in made):
        for pair, _ in made:
            for one, other in ((pair.weight, pair.scale), (pair.scale, pair.weight)):
                if one in native:
                    native.setdefault(other, native[one])
    return made, native


def _pair_pieces(bucket: Bucket, pair: RecordedPair) -> list[Piece]:
    """Scales and codes in turn; none if the kernels don't take one of them."""
    pieces = []
    for copy in pair.copies:
        source, destination = copy.write.source, copy.write.destination(pair.target.parameter)
        assert source is not None
        views = ((pair.scale, copy.scale_source), (pair.weight, source))
        if not all(_lies_in(bucket.tensor(position), view) for position, view in views):
            return []
        scale_place, place = (_place(bucket, *one) for one in views)
        scales = Piece(scale_place, copy.scale_source, copy.scale_destination, kind=Kind.SCALES)
        codes = Piece(place, source, destination, None, (copy.block_n, 1), Kind.CODES)
        pieces += [scales, codes]
    is_local = all(piece.view.device == piece.destination.device for piece in pieces)
    return pieces if is_local and all(piece.fits() for piece in pieces) else []


def _lies_in(sent: torch.Tensor, view: torch.Tensor) -> bool:
    return sent.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()


def _place(bucket: Bucket, position: int, view: torch.Tensor) -> tuple[int, int]:
    """Which sent tensor a view of a bucket's tensor lies in, and how many bytes behind its start."""
    first, start = bucket.place(position)
    return first, view.data_ptr() - bucket.tensor(position).data_ptr() + start


def _pieces(bucket: Bucket, recorded: RecordedPiece, options: Options) -> list[Piece]:
    """The matrices of one write; none if source and destination are on different devices."""
    sent, target = bucket.tensor(recorded.position), recorded.target
    write = recorded.write.repeat(sent)
    source, destination = write.source, write.destination(target.parameter)
    assert source is not None
    assert write.region is not None
    if source.device != destination.device or source.shape != destination.shape:
        return []
    if not target.is_fp8:
        rows, out = as_matrix(source), as_matrix(destination)
        if rows is None or out is None:
            return []
        return [Piece(_place(bucket, recorded.position, source), rows, out)]
    assert target.scale is not None
    scales, region = target.scale.data, write.region
    if scales.dim() == 3:
        scales = scales[region.start[0] : region.start[0] + region.shape[0]]
    granularity = granularity_of(target.granularity, options.weight_block_size)
    made = []
    for codes, view, part in zip(
        matrices(destination), matrices(source), matrices(scales), strict=True
    ):
        owned = scales_of(target, target.name, region, part, granularity)
        place = _place(bucket, recorded.position, view)
        made.append(Piece(place, view, codes, owned, granularity.block(view.shape)))
    return made
