"""What the native loaders did with a bucket, tensor by tensor."""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..arrival.bucket import Bucket
from ..interception.region import Region
from ..interception.writes import MatrixNumbers, RecordedWrite, Write
from ..model.parameters import Target
from .pairs import HalfPair, PairCopy


@dataclass(frozen=True)
class RecordedPiece:
    """One write of a recorded call: from which tensor of the bucket, into which parameter."""

    position: int
    target: Target
    write: RecordedWrite


class PieceColumns:
    """What a table wants to know of every piece, written down while the piece is at hand.

    Reading it off 18,000 objects later, one attribute after another, takes longer than the rest of a
    recipe.
    """

    def __init__(self) -> None:
        self._positions, self._targets = array("q"), array("q")
        self._numbers = bytearray()
        self.regions: list[Region | None] = []

    def add(self, position: int, target: Target, write: RecordedWrite) -> None:
        self._positions.append(position)
        self._targets.append(target.index)
        self._numbers += write.numbers
        self.regions.append(write.write.region)

    @property
    def positions(self) -> np.ndarray:
        """Of the sent tensors, int64 [pieces]."""
        return np.array(self._positions, np.int64)

    @property
    def targets(self) -> np.ndarray:
        """Indices of the targets, int64 [pieces]."""
        return np.array(self._targets, np.int64)

    @property
    def numbers(self) -> np.ndarray:
        """`MatrixNumbers`, int64 [pieces, fields]."""
        fields = len(MatrixNumbers._fields)
        return np.frombuffer(bytes(self._numbers), np.int64).reshape(-1, fields)


@dataclass(frozen=True)
class RecordedPair:
    """The copies of an FP8 weight and its scale, by their positions in the bucket."""

    weight: int
    scale: int
    target: Target
    copies: list[PairCopy]


class Recording:
    """What the native loaders did with each tensor of a bucket; filled from several threads."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.pieces: list[RecordedPiece] = []
        self.columns = PieceColumns()
        self.pairs: list[RecordedPair] = []
        # Halves of pairs whose other half has not come, by position.
        self.waiting: Counter[int] = Counter()
        self.refused: dict[int, str] = {}
        self._lock = threading.Lock()

    def refuse(self, position: int | None, reason: str) -> None:
        """Leave this tensor to the native loaders (None: it is not known which tensor it was)."""
        with self._lock:
            self.refused.setdefault(-1 if position is None else position, reason)

    def add(
        self,
        position: int,
        sent: torch.Tensor,
        target: Target,
        writes: list[Write],
        recorded: list[RecordedWrite] | None,
    ) -> None:
        """These are all writes of one loader call; `recorded` if they are known relative to `sent`."""
        if not target.is_repeatable:
            self.refuse(position, "experts may move to other ranks while serving")
            return
        taken: Sequence[RecordedWrite | None] = (
            recorded if recorded is not None else [write.taken_from(sent) for write in writes]
        )
        if any(one is None for one in taken):
            self.refuse(position, "its loader makes a tensor of its own")
        else:
            with self._lock:
                for one in taken:
                    assert one is not None
                    self.pieces.append(RecordedPiece(position, target, one))
                    self.columns.add(position, target, one)

    def wait(self, position: int | None) -> None:
        """Half of an FP8 pair came."""
        if position is None:
            self.refuse(None, "half of an FP8 pair that was not sent")
            return
        with self._lock:
            self.waiting[position] += 1

    def add_pair(self, pair: HalfPair, copies: list[PairCopy]) -> None:
        """The other half came too, and this is what was copied."""
        if pair.weight_from is None or pair.scale_from is None:
            return
        positions = (pair.weight_from.position, pair.scale_from.position)
        if not pair.target.is_repeatable:
            for position in positions:
                self.refuse(position, "experts may move to other ranks while serving")
            return
        with self._lock:
            self.waiting.subtract(positions)
            self.pairs.append(RecordedPair(*positions, pair.target, copies))
