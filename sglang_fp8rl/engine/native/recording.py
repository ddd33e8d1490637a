"""What the native loaders did with a bucket: rows of a table, made while each write is at hand."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ...numerics.cast import as_matrix
from ...numerics.grid import ceil_div
from ...numerics.write_table import LONGEST_ROW, ROW_FIELDS, Kind, Piece
from ..arrival.bucket import Bucket
from ..arrival.sent_tensors import Source, SourceIndex
from ..interception import Write
from ..model.parameters import Target
from .pairs import Pair, PairCopy

# What was done with one matrix: its source, the codes or values, and the scales if it was cast.
Done = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

APART = "half of an FP8 pair, the other is in another bucket"


class Recording:
    """What the native loaders did with each tensor of a bucket; filled from several threads.

    Args:
        sent: its tensors as the loaders get them (`apart`).
        sources: are told why buckets like this one are left to the native loaders.

    Attributes:
        fills: writes of no sent tensor (the padding of a vocabulary).
        exponents: positions of scales that have to be powers of two.
    """

    def __init__(
        self, bucket: Bucket, sent: Iterable[tuple[str, torch.Tensor]], sources: SourceIndex
    ) -> None:
        self.bucket, self._storages = bucket, [one.untyped_storage() for _, one in sent]
        self.exponents: list[int] = []
        self.fills: list[tuple[Target, Write]] = []
        self._sources = sources
        # Flat, so that 18,000 of each become an array at once.
        self._rows, self._of_rows, self._boxes = array("q"), array("q"), array("q")
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
        self, source: Source, target: Target, write: Write, done: Sequence[Done], box: int | None
    ) -> None:
        """One write of a sent tensor, as it was done.

        Args:
            done: nothing for a fill.
            box: its number; None for a write that is no box.
        """
        if write.source is None:
            self.fills.append((target, write))
        if box is None:
            self._sources.leave_native((), "it writes what is no box")
            return
        pieces = []
        for view, destination, scales in done:
            block = (1, 1) if scales is None else target.shares_scale.block(view.shape)
            pieces.append(self._piece(source, view, destination, scales, block))
        self._take(target, pieces, [source], [box])

    def add_pair(self, pair: Pair, copies: Sequence[PairCopy], boxes: Iterable[int]) -> None:
        """Both halves of an FP8 weight came, and this is what was copied."""
        target, weight, scale = pair.target, pair.weight.source, pair.scale.source
        if weight is None or scale is None:
            self._sources.leave_native((), APART)
            return
        if target.takes_packed_scales:
            self.exponents.append(scale.position)
        pieces = []
        for codes, destination, scales, scale_destination, block_n in copies:
            pieces += [
                self._piece(scale, scales, scale_destination, kind=Kind.SCALES),
                self._piece(weight, codes, destination, None, (block_n, 1), Kind.CODES),
            ]
        self._take(target, pieces, [scale, weight], boxes)

    def _take(
        self,
        target: Target,
        pieces: Sequence[Piece | None],
        sources: Sequence[Source],
        boxes: Iterable[int],
    ) -> None:
        """Args: `sources`: of the pieces, in turn."""
        fitting = [piece for piece in pieces if piece is not None]
        if len(fitting) < len(pieces):
            self._sources.leave_native((), "the kernels don't know how to write it")
            return
        if not target.is_repeatable:
            self._sources.leave_native((), "experts may move to other ranks while serving")
        with self._lock:
            for at, piece in enumerate(fitting):
                self._rows.extend(piece.row())
                self._of_rows.append(sources[at % len(sources)].position)
            for box in boxes:
                self._boxes.extend((target.index, box))

    def _piece(
        self,
        source: Source,
        view: torch.Tensor,
        destination: torch.Tensor,
        scales: torch.Tensor | None = None,
        block: tuple[int, int] = (1, 1),
        kind: Kind | None = None,
    ) -> Piece | None:
        """What was done with a view of a sent tensor; None where the kernels don't know how to. Args as of `Piece`."""
        offset, rows, out = source.offset_of(view), as_matrix(view), as_matrix(destination)
        if offset is None or rows is None or out is None or view.device != destination.device:
            return None
        if kind is None and scales is None and view.is_contiguous() and destination.is_contiguous():
            rows, out = _in_short_rows(rows), _in_short_rows(out)
        memory, start = self.bucket.place(source.position)
        place = memory, start + offset * view.element_size()
        piece = Piece(place, rows, out, scales, block, kind)
        return piece if piece.fits() else None


def _in_short_rows(matrix: torch.Tensor) -> torch.Tensor:
    """A contiguous matrix, its rows cut in equal parts that kernels take (Mllama's embeddings have longer ones)."""
    columns = matrix.shape[1]
    if columns <= LONGEST_ROW:
        return matrix
    least = ceil_div(columns, LONGEST_ROW)
    parts = next(at for at in range(least, columns + 1) if columns % at == 0)
    return matrix.reshape(-1, columns // parts)
