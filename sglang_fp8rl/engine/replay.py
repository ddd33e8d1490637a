"""Record once, replay for ever: what a bucket's native loaders wrote, as one table.

A recording is made while the native loaders run. It becomes a plan if the call succeeded; the next
bucket of the same layout is cast from the plan, without a loader, a name lookup or any Python per
tensor. What can't be told from the bucket's layout alone stays with the native path, by name.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..config import Options
from ..numerics.cast_table import CastTable, Piece
from ..numerics.table import make_runner
from ..scheme import Granularity
from .buckets import Bucket, FlatBucket
from .quantize import matrices, scales_of
from .report import RefitReport
from .targets import Target
from .writes import RecordedWrite, Write

# Tensors of all plans together: a table row of 136 bytes each, its name and its layout.
MAX_TENSORS = 65_536
_SAMPLES = 4


@dataclass(frozen=True)
class RecordedPiece:
    """One write of a recorded call: from which tensor of the bucket, into which parameter."""

    position: int
    target: Target
    write: RecordedWrite


class Recording:
    """What the native loaders did with each tensor of a bucket; filled from several threads."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.pieces: list[RecordedPiece] = []
        self.refused: dict[int, str] = {}
        self._lock = threading.Lock()

    def refuse(self, position: int | None, reason: str) -> None:
        """This tensor can't be replayed (None: nobody knows which tensor it was)."""
        with self._lock:
            self.refused.setdefault(-1 if position is None else position, reason)

    def add(self, position: int, sent: torch.Tensor, target: Target, writes: list[Write]) -> None:
        """These are all writes of one loader call."""
        if not target.is_repeatable:
            self.refuse(position, "experts may move to other ranks while serving")
            return
        taken = [write.taken_from(sent) for write in writes]
        if any(one is None for one in taken):
            self.refuse(position, "its loader makes a tensor of its own")
        else:
            with self._lock:
                self.pieces += [RecordedPiece(position, target, one) for one in taken if one]


@dataclass
class BucketPlan:
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


def plan_of(
    recording: Recording,
    report: RefitReport,
    touched: dict[str, tuple],
    options: Options,
) -> BucketPlan | None:
    """The plan that a successful call was recorded for; None if it can't be replayed at all."""
    bucket = recording.bucket
    names = bucket.names
    if len(set(names)) < len(names) or -1 in recording.refused:
        return None
    native = dict(recording.refused)
    pieces: list[Piece] = []
    positions: list[int] = []
    singly: list[RecordedPiece] = []
    regions: list[int] = []
    targets: set[int] = set()
    samples: list[tuple[RecordedPiece, tuple[torch.Tensor, torch.Tensor]]] = []
    owners: dict[int, torch.nn.Parameter] = {}
    for recorded in recording.pieces:
        if recorded.position in native:
            continue
        target, write = recorded.target, recorded.write.write
        if write.region is None:
            native[recorded.position] = "it writes what is no box"
            continue
        owners[id(target.parameter)] = target.parameter
        regions.append(report.coverage.number_of(target.index, write.region))
        targets.add(target.index)
        made = _pieces(bucket, recorded, options) if recorded.write.shape else []
        if not made or not all(piece.fits() for piece in made):
            singly.append(recorded)
            continue
        scales = made[0].scales
        alike = [one for one, _ in samples if one.target.granularity is target.granularity]
        if scales is not None and len(made) == 1 and len(alike) < _SAMPLES:
            samples.append((recorded, (made[0].destination, scales)))
        pieces += made
        positions += [recorded.position] * len(made)
    found = np.array(regions, np.int64)
    if report.coverage.overlap(found):
        return None
    devices = {piece.destination.device for piece in pieces}
    if len(devices) > 1:
        return None
    runner = make_runner(
        CastTable.of(pieces),
        devices.pop() if devices else torch.device("cpu"),
        pow2_scale=options.use_weight_pow2_scale,
        round_to_bf16=options.round_to_bf16,
    )
    if runner is None:
        return None
    replayed = {name for position, name in enumerate(names) if position not in native}
    kept = {name: part for name, part in touched.items() if name in replayed}
    return BucketPlan(
        layout=bucket.layout,
        nbytes=bucket.nbytes,
        numbers=report.window.numbers_of(names),
        stored=report.window.numbers_of(kept),
        touched=kept,
        positions=positions,
        runner=runner,
        singly=singly,
        native=native,
        regions=found,
        targets=np.array(sorted(targets), np.int64),
        samples=samples,
        owners=[(parameter, parameter.data_ptr()) for parameter in owners.values()],
        metadata=bucket.metadata if isinstance(bucket, FlatBucket) else (),
    )


def _pieces(bucket: Bucket, recorded: RecordedPiece, options: Options) -> list[Piece]:
    """The matrices of one write; none if source and destination are on different devices."""
    sent, target = bucket.tensor(recorded.position), recorded.target
    write = recorded.write.repeat(sent)
    source, destination = write.source, write.destination(target.parameter)
    assert source is not None
    assert write.region is not None
    if source.device != destination.device or source.shape != destination.shape:
        return []
    first, start = bucket.place(recorded.position)
    base = sent.data_ptr() - start

    def place(view: torch.Tensor) -> tuple[int, int]:
        return first, view.data_ptr() - base

    if not target.is_fp8:
        flat = _as_rows(source), _as_rows(destination)
        return [] if None in flat else [Piece(place(source), *flat)]  # type: ignore[arg-type]
    assert target.scale is not None
    scales, region = target.scale.data, write.region
    if scales.dim() == 3:
        scales = scales[region.start[0] : region.start[0] + region.shape[0]]
    per_channel = target.granularity is Granularity.PER_CHANNEL
    made = []
    for codes, view, part in zip(
        matrices(destination), matrices(source), matrices(scales), strict=True
    ):
        block_size = (1, view.shape[1]) if per_channel else options.weight_block_size
        owned = scales_of(target, target.name, region, part, options.weight_block_size)
        made.append(Piece(place(view), view, codes, owned, block_size))
    return made


def _as_rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view [rows, last dimension], or None where there is none."""
    if tensor.dim() == 2:
        return tensor
    if tensor.dim() < 2:
        return tensor.reshape(1, -1)
    return tensor.flatten(0, -2) if tensor.is_contiguous() else None


@dataclass
class ReplayCounts:
    """What was replayed and what was not, since the start."""

    calls: int = 0
    tensors: int = 0
    native_calls: int = 0
    native_tensors: int = 0
    native_reasons: Counter[str] = field(default_factory=Counter)


class PlanStore:
    """Plans by layout: few of them, the one longest unused goes first."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple, list[BucketPlan]] = OrderedDict()
        self.counts = ReplayCounts()

    def find(self, bucket: Bucket) -> BucketPlan | None:
        plans = self._plans.get(bucket.key)
        if plans is None:
            return None
        self._plans.move_to_end(bucket.key)
        plan = next((plan for plan in plans if plan.fits(bucket)), None)
        if plan is not None and isinstance(bucket, FlatBucket):
            bucket.take_metadata(plan.metadata)
        return plan

    def add(self, bucket: Bucket, plan: BucketPlan) -> None:
        """Keep a plan; one of the same layout that no longer fits is replaced."""
        others = [old for old in self._plans.get(bucket.key, ()) if old.layout != plan.layout]
        self._plans[bucket.key] = [*others, plan]
        self._plans.move_to_end(bucket.key)
        while len(self) > 1 and self.size > MAX_TENSORS:
            self._plans.popitem(last=False)

    def __len__(self) -> int:
        return sum(map(len, self._plans.values()))

    @property
    def size(self) -> int:
        return sum(plan.size for plans in self._plans.values() for plan in plans)

    def as_dict(self) -> dict[str, Any]:
        """For the status section."""
        counts = self.counts
        return {
            "plans": len(self),
            "calls": counts.calls,
            "tensors": counts.tensors,
            "native_calls": counts.native_calls,
            "native_tensors": counts.native_tensors,
            "native_reasons": dict(counts.native_reasons),
        }
