"""What the native loaders did with a bucket: rows of a table, made while each write is at hand."""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from ...numerics.cast import as_matrix
from ...numerics.write_table import ROW_FIELDS, Kind, Piece
from ...scheme import Granularity
from ..arrival.bucket import Bucket
from ..arrival.sent_tensors import Source
from ..interception import Part, Write, extent_of
from ..model.parameters import Target
from .pairs import Pair, PairCopy

# What was done with one matrix: its source, the codes or values, and the scales if it was cast.
Done = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

_MOVES = "experts may move to other ranks while serving"
_SAMPLES = 8  # of each granularity


class Sample(NamedTuple):
    """A write to measure the SQNR on: which part of which tensor of the bucket, and what was made of it."""

    position: int
    granularity: Granularity
    part: Part
    codes: torch.Tensor
    scales: torch.Tensor


class Recording:
    """What the native loaders did with each tensor of a bucket; filled from several threads.

    Args:
        sent: its tensors as the loaders get them (`apart`).

    Attributes:
        fills: writes of no sent tensor (the padding of a vocabulary).
        exponents: positions of scales that have to be powers of two.
        waiting: how many halves of pairs, whose other half has not come.
        refused: reasons why buckets like this one are left to the native loaders.
    """

    def __init__(self, bucket: Bucket, sent: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.bucket, self._storages = bucket, [one.untyped_storage() for _, one in sent]
        self.samples: list[Sample] = []
        self.exponents: list[int] = []
        self.fills: list[tuple[Target, Write]] = []
        self.waiting = 0
        self.refused: dict[str, None] = {}
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
        """Per row the position of the sent tensor that it is of, int64 [rows]."""
        return np.array(self._of_rows, np.int64)

    @property
    def boxes(self) -> np.ndarray:
        """Of each write: the target and the number of its box, int64 [writes, 2]."""
        return np.array(self._boxes, np.int64).reshape(-1, 2)

    def is_kept(self) -> bool:
        """Behind the call: whether somebody still has a sent tensor, to compute with later on."""
        return any(torch._C._storage_Use_Count(one._cdata) > 1 for one in self._storages)

    def add(
        self,
        source: Source,
        target: Target,
        write: Write,
        done: Iterable[Done],
        box: int | None,
    ) -> None:
        """One write of a sent tensor, as it was done.

        Args:
            done: nothing for a fill.
            box: its number; None for a write that is no box.
        """
        pieces = [self._piece(source, target, one) for one in done]
        if write.source is None:
            self.fills.append((target, write))
        if not target.is_repeatable:
            self.refused[_MOVES] = None
        elif box is None:
            self.refused["it writes what is no box"] = None
        elif not self._take(target, pieces, [source], [box]):
            self.refused["the kernels don't know how to write it"] = None
        else:
            self._sample(source, target, write, pieces)

    def _take(
        self,
        target: Target,
        pieces: list[Piece | None],
        sources: list[Source],
        boxes: Iterable[int],
    ) -> bool:
        """Returns False where the kernels don't know one of the pieces: then nothing is taken.

        Args:
            sources: of the pieces, in turn.
        """
        fitting = [piece for piece in pieces if piece is not None and piece.fits()]
        if len(fitting) < len(pieces):
            return False
        with self._lock:
            for at, piece in enumerate(fitting):
                self._rows.extend(piece.row())
                self._of_rows.append(sources[at % len(sources)].position)
            for box in boxes:
                self._boxes.extend((target.index, box))
        return True

    def _piece(self, source: Source, target: Target, done: Done) -> Piece | None:
        view, destination, scales = done
        place = self._place(source, view)
        rows, out = as_matrix(view), as_matrix(destination)
        if place is None or rows is None or out is None or view.device != destination.device:
            return None
        if scales is None:
            return Piece(place, rows, out)
        return Piece(place, rows, out, scales, target.shares_scale.block(rows.shape))

    def _place(self, source: Source, view: torch.Tensor) -> tuple[int, int] | None:
        """Which memory of the bucket a view of a sent tensor lies in, and how many bytes behind its start.

        None for what lies elsewhere, or beyond the tensor's end.
        """
        start, (first, last) = view.data_ptr(), extent_of(view)
        end = start + (last - first) * view.element_size()
        if not source.address <= start <= end <= source.end_address:
            return None
        memory, offset = self.bucket.place(source.position)
        return memory, start - source.address + offset

    def _sample(
        self, source: Source, target: Target, write: Write, pieces: list[Piece | None]
    ) -> None:
        granularity = target.granularity
        if not target.is_fp8 or len(pieces) != 1 or self._sampled[granularity] >= _SAMPLES:
            return
        (piece,) = pieces
        assert source.tensor is not None
        part = write.taken_from(source.tensor)
        if part is not None and piece is not None and piece.scales is not None:
            self._sampled[granularity] += 1
            codes, scales = piece.destination, piece.scales
            self.samples.append(Sample(source.position, granularity, part, codes, scales))

    def wait(self, source: Source | None) -> None:
        """Half of an FP8 pair came."""
        if source is None:
            self.refused["half of an FP8 pair that was not sent"] = None
            return
        with self._lock:
            self.waiting += 1

    def add_pair(self, pair: Pair, copies: list[PairCopy], boxes: list[int]) -> None:
        """The other half came too, and this is what was copied."""
        target, weight, scale = pair.target, pair.weight.source, pair.scale.source
        if weight is None or scale is None:
            return
        with self._lock:
            self.waiting -= 2
            if copies and target.takes_packed_scales:
                self.exponents.append(scale.position)
        pieces = [one for copy in copies for one in self._pair_pieces(weight, scale, target, copy)]
        if not target.is_repeatable or not self._take(target, pieces, [scale, weight], boxes):
            reason = "an FP8 pair that the kernels can't copy" if target.is_repeatable else _MOVES
            self.refused[reason] = None

    def _pair_pieces(
        self, weight: Source, scale: Source, target: Target, copy: PairCopy
    ) -> list[Piece | None]:
        """Scales and codes."""
        codes, destination = copy.write.source, copy.write.destination(target.parameter)
        assert codes is not None
        of_scales, of_codes = self._place(scale, copy.scale_source), self._place(weight, codes)
        if of_scales is None or of_codes is None or codes.device != destination.device:
            return [None]
        scales, block = copy.scale_destination, (copy.block_n, 1)
        return [
            Piece(of_scales, copy.scale_source, scales, kind=Kind.SCALES),
            Piece(of_codes, codes, destination, None, block, Kind.CODES),
        ]
