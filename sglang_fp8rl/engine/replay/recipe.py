"""How a bucket of one layout is written without its loaders: one table of casts and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...config import Options
from ...numerics.runners import TableRunner, make_runner
from ...numerics.write_table import CastTable
from ..arrival.bucket import Bucket, FlatBucket
from ..native.call import Call
from ..native.recording import RecordedPiece, Recording, Sample
from ..report.report import Arrived, RefitReport


@dataclass
class Recipe:
    """How a bucket of one layout is written.

    Attributes:
        layout: of the bucket it was recorded from.
        brings: what each bucket of that layout brings.
        positions: per piece of the table, the tensor it is from.
        singly: writes that the kernels don't know, done one by one.
        native: positions that take the native path, with the reason.
        native_reach: where their writes went when the whole bucket took it.
        samples: writes to measure the SQNR on, with their codes and scales.
        owners: parameters, and where they were.
        exponents: positions of scales that have to be powers of two.
        metadata: of a flattened bucket.
    """

    layout: tuple[list, ...]
    brings: Arrived
    positions: np.ndarray
    runner: TableRunner
    singly: list[RecordedPiece]
    native: dict[int, str]
    native_reach: set[tuple]
    regions: np.ndarray
    targets: np.ndarray
    samples: list[Sample]
    owners: list[tuple[torch.Tensor, int]]
    exponents: tuple[int, ...] = ()
    metadata: Sequence[Any] = ()

    def fits(self, bucket: Bucket) -> bool:
        """Whether the bucket has this layout, and the parameters are where they were."""
        return bucket.layout == self.layout and all(
            parameter.data_ptr() == address for parameter, address in self.owners
        )

    @property
    def size(self) -> int:
        return len(self.brings.numbers)


def recipe_of(
    recording: Recording, report: RefitReport, call: Call, options: Options
) -> Recipe | None:
    """The recipe that a successful call was recorded for; None if it can't be replayed at all.

    It can't where writes go to several devices, or their boxes overlap.
    """
    if -1 in recording.refused:
        return None
    bucket, native = recording.bucket, _native_of(recording)
    left = list(native)
    rows, of_rows, boxes = recording.rows, recording.of_rows, recording.boxes
    if left:
        is_ours = ~np.isin(of_rows[:, 0], left)
        rows, of_rows = rows[is_ours], of_rows[is_ours]
        boxes = boxes[~np.isin(boxes[:, 0], left)]
    devices = {recording.targets[at].parameter.device for at in np.unique(of_rows[:, 1]).tolist()}
    if report.coverage.overlap(boxes[:, 2]) or len(devices) > 1:
        return None
    targets = np.unique(boxes[:, 1])
    owners = [recording.targets[at] for at in targets.tolist()]
    memory = [tensor for one in owners for tensor in (one.parameter, one.scale)]
    runner = make_runner(
        CastTable.of_rows(rows, tuple(tensor for tensor in memory if tensor is not None)),
        devices.pop() if devices else torch.device("cpu"),
        pow2_scale=options.use_weight_pow2_scale,
        round_to_bf16=options.round_to_bf16,
    )
    if runner is None:
        return None
    assert call.brings is not None
    return Recipe(
        layout=bucket.layout,
        brings=replace(call.brings, has_taken=bool(call.touched)),
        positions=of_rows[:, 0].copy(),
        runner=runner,
        singly=[piece for piece in recording.singly if piece.position not in native],
        native=native,
        native_reach={
            place
            for place, sources in call.reached.items()
            if any(source.position in native for source in sources)
        },
        regions=boxes[:, 2].copy(),
        targets=targets,
        samples=[one for one in recording.samples if one[0].position not in native],
        owners=[(one.parameter, one.parameter.data_ptr()) for one in owners],
        exponents=tuple(
            pair.scale
            for pair in recording.pairs
            if pair.weight not in native and pair.target.takes_packed_scales and pair.has_copies
        ),
        metadata=bucket.metadata if isinstance(bucket, FlatBucket) else (),
    )


def _native_of(recording: Recording) -> dict[int, str]:
    """What stays native, with the reason: of a pair both halves or neither."""
    native, pairs = dict(recording.refused), recording.pairs
    for position, count in recording.waiting.items():
        if count:
            native.setdefault(position, "half of an FP8 pair, the other is in another bucket")
    while any((pair.weight in native) != (pair.scale in native) for pair in pairs):
        for pair in pairs:
            for one, other in ((pair.weight, pair.scale), (pair.scale, pair.weight)):
                if one in native:
                    native.setdefault(other, native[one])
    return native
