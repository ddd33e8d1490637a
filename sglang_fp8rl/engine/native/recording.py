"""What the native loaders did with a bucket: rows of a table, made while each write is at hand."""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ...numerics.cast import as_matrix
from ...numerics.grid import granularity_of
from ...numerics.write_table import ROW_FIELDS, BlockSize, Kind, Piece
from ...scheme import Granularity
from ..arrival.bucket import Bucket
from ..arrival.sent_tensors import Source
from ..interception.writes import RecordedWrite, Write
from ..model.parameters import Target
from .pairs import HalfPair, PairCopy

# What was done with one matrix: its source, the codes or values, and the scales if it was cast.
Done = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

_MOVES = "experts may move to other ranks while serving"
_SAMPLES = 8  # of each granularity


@dataclass(frozen=True)
class RecordedPiece:
    """One write of a recorded call: from which tensor of the bucket, into which parameter."""

    position: int
    target: Target
    write: RecordedWrite


# A write to measure the SQNR on, with its codes and scales.
Sample = tuple[RecordedPiece, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class RecordedPair:
    """An FP8 weight and its scale, by their positions in the bucket.

    Attributes:
        has_copies: False where it is for another rank's experts.
    """

    weight: int
    scale: int
    target: Target
    has_copies: bool


class Recording:
    """What the native loaders did with each tensor of a bucket; filled from several threads.

    Args:
        block_size: of blockwise scales.

    Attributes:
        singly: writes that the kernels don't know.
        targets: that anything was written into, by index.
        waiting: halves of pairs whose other half has not come, by position.
        refused: positions that are left to the native loaders, with the reason (-1: the whole bucket).
    """

    def __init__(self, bucket: Bucket, block_size: BlockSize) -> None:
        self.bucket, self._block_size = bucket, block_size
        self.singly: list[RecordedPiece] = []
        self.samples: list[Sample] = []
        self.pairs: list[RecordedPair] = []
        self.targets: dict[int, Target] = {}
        self.waiting: Counter[int] = Counter()
        self.refused: dict[int, str] = {}
        # Flat, so that 18,000 of each become an array at once.
        self._rows, self._of_rows, self._boxes = array("q"), array("q"), array("q")
        self._sampled: Counter[Granularity] = Counter()
        self._lock = threading.Lock()

    @property
    def rows(self) -> np.ndarray:
        """Of a `CastTable`, int64 [rows, `ROW_FIELDS`]; a pair's scales and codes in turn."""
        return np.array(self._rows, np.int64).reshape(-1, ROW_FIELDS)

    @property
    def of_rows(self) -> np.ndarray:
        """Per row the sent tensor it is of and the target it goes to, int64 [rows, 2]."""
        return np.array(self._of_rows, np.int64).reshape(-1, 2)

    @property
    def boxes(self) -> np.ndarray:
        """Of each write: the sent tensor, the target, the number of its box, int64 [writes, 3]."""
        return np.array(self._boxes, np.int64).reshape(-1, 3)

    def refuse(self, position: int | None, reason: str) -> None:
        """Leave this tensor to the native loaders (None: it is not known which tensor it was)."""
        with self._lock:
            self.refused.setdefault(-1 if position is None else position, reason)

    def add(
        self,
        source: Source,
        target: Target,
        write: Write,
        recorded: RecordedWrite | None,
        done: Iterable[Done],
        box: int | None,
    ) -> None:
        """One write of a sent tensor, as it was done.

        Args:
            recorded: the write relative to the sent tensor, if that is known.
            box: its number; None for a write that is no box.
        """
        sent = source.tensor
        assert sent is not None
        recorded = recorded or write.taken_from(sent)
        if not target.is_repeatable:
            self.refuse(source.position, _MOVES)
        elif recorded is None:
            self.refuse(source.position, "it is read as another dtype, or beyond its end")
        elif box is None:
            self.refuse(source.position, "it writes what is no box")
        else:
            piece = RecordedPiece(source.position, target, recorded)
            pieces = [self._piece(source, target, one) for one in done]
            with self._lock:
                self._boxes.extend((source.position, target.index, box))
                self.targets[target.index] = target
                if self._add_rows(target, pieces, [source.position]):
                    self._sample(piece, pieces)
                else:
                    self.singly.append(piece)

    def _piece(self, source: Source, target: Target, done: Done) -> Piece | None:
        view, destination, scales = done
        if view.device != destination.device:
            return None
        rows, out = as_matrix(view), as_matrix(destination)
        if rows is None or out is None:
            return None
        place = self._place(source, view)
        if scales is None:
            return Piece(place, rows, out)
        granularity = granularity_of(target.granularity, self._block_size)
        return Piece(place, rows, out, scales, granularity.block(rows.shape))

    def _place(self, source: Source, view: torch.Tensor) -> tuple[int, int]:
        """Which memory of the bucket a view of a sent tensor lies in, and how many bytes behind its start."""
        first, start = self.bucket.place(source.position)
        return first, view.data_ptr() - source.address + start

    def _add_rows(self, target: Target, pieces: list[Piece | None], positions: list[int]) -> bool:
        """Returns False where the kernels don't know one of them: then there is no row."""
        fitting = [piece for piece in pieces if piece is not None and piece.fits()]
        if not fitting or len(fitting) < len(pieces):
            return False
        for at, piece in enumerate(fitting):
            self._rows.extend(piece.row())
            self._of_rows.extend((positions[at % len(positions)], target.index))
        return True

    def _sample(self, recorded: RecordedPiece, pieces: list[Piece | None]) -> None:
        granularity, (first, *others) = recorded.target.granularity, pieces
        if (
            first is None
            or first.scales is None
            or others
            or self._sampled[granularity] >= _SAMPLES
        ):
            return
        self._sampled[granularity] += 1
        self.samples.append((recorded, (first.destination, first.scales)))

    def wait(self, position: int | None) -> None:
        """Half of an FP8 pair came."""
        if position is None:
            self.refuse(None, "half of an FP8 pair that was not sent")
            return
        with self._lock:
            self.waiting[position] += 1

    def add_pair(self, pair: HalfPair, copies: list[PairCopy], boxes: list[int]) -> None:
        """The other half came too, and this is what was copied."""
        weight, scale, target = pair.weight_from, pair.scale_from, pair.target
        if weight is None or scale is None:
            return
        positions = [scale.position, weight.position]
        pieces = [
            piece for copy in copies for piece in self._pair_pieces(weight, scale, pair, copy)
        ]
        with self._lock:
            self.waiting.subtract(positions)
            self.pairs.append(RecordedPair(weight.position, scale.position, target, bool(copies)))
            is_known = target.is_repeatable and (
                not copies or self._add_rows(target, pieces, positions)
            )
            if is_known:
                self.targets[target.index] = target
                for box in boxes:
                    self._boxes.extend((weight.position, target.index, box))
        if not is_known:
            reason = "an FP8 pair that the kernels can't copy" if target.is_repeatable else _MOVES
            for position in positions:
                self.refuse(position, reason)

    def _pair_pieces(
        self, weight: Source, scale: Source, pair: HalfPair, copy: PairCopy
    ) -> list[Piece | None]:
        """Scales and codes."""
        codes, destination = copy.write.source, copy.write.destination(pair.target.parameter)
        assert codes is not None
        pieces = [
            Piece(
                self._place(scale, copy.scale_source),
                copy.scale_source,
                copy.scale_destination,
                kind=Kind.SCALES,
            ),
            Piece(
                self._place(weight, codes), codes, destination, None, (copy.block_n, 1), Kind.CODES
            ),
        ]
        is_as_sent = _lies_in(scale, copy.scale_source) and _lies_in(weight, codes)
        is_local = all(piece.view.device == piece.destination.device for piece in pieces)
        return [piece if is_as_sent and is_local else None for piece in pieces]


def _lies_in(source: Source, view: torch.Tensor) -> bool:
    sent = source.tensor
    return sent is not None and (
        sent.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    )
