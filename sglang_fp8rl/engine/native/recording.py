"""What SGLang's loaders do with each tensor of a bucket, as rows of a table that does it, or does it again."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable

import numpy as np
import torch

from ...numerics.write_table import ROW_FIELDS, Piece
from ..arrival.bucket import Bucket
from ..arrival.sent_tensors import Source, SourceIndex
from ..interception import Write
from ..model.parameters import Target
from .matrix_writes import row_of

APART = "half of an FP8 pair, the other is in another bucket"
_NONE = array("q")


class BucketRows:
    """Rows of a `CastTable`, a pair's scales and codes in turn, and what each is of; args as the properties, in one row."""

    def __init__(
        self, fields: array = _NONE, positions: array = _NONE, boxes: array = _NONE
    ) -> None:
        # Flat, so that 18,000 of each become an array at once.
        self._fields, self._positions, self._boxes = fields[:], positions[:], boxes[:]
        self._lock = threading.Lock()

    @property
    def fields(self) -> np.ndarray:
        """Int64 [rows, `ROW_FIELDS`]; where a source lies as `Bucket.place` says."""
        return np.array(self._fields, np.int64).reshape(-1, ROW_FIELDS)

    @property
    def positions(self) -> np.ndarray:
        """Per row the position of the sent tensor that it is of, int64 [rows]."""
        return np.array(self._positions, np.int64)

    @property
    def boxes(self) -> np.ndarray:
        """Of each write: the target and the number of its box, int64 [writes, 2]."""
        return np.array(self._boxes, np.int64).reshape(-1, 2)

    def extend(self, more: BucketRows) -> None:
        """Have these too, behind the others."""
        with self._lock:
            self._fields += more._fields
            self._positions += more._positions
            self._boxes += more._boxes


class Recording(BucketRows):
    """What the loaders did with each tensor of a bucket; filled from several threads.

    Args:
        sent: its tensors as the loaders get them (`apart`).
        sources: are told why buckets like this one are left to the loaders.

    Attributes:
        fills: writes of no sent tensor (the padding of a vocabulary).
        exponents: positions of scales that have to be powers of two.
    """

    def __init__(
        self, bucket: Bucket, sent: Iterable[tuple[str, torch.Tensor]], sources: SourceIndex
    ) -> None:
        super().__init__()
        self.bucket, self._storages = bucket, [one.untyped_storage() for _, one in sent]
        self.exponents: list[int] = []
        self.fills: list[tuple[Target, Write]] = []
        self._sources = sources

    def is_kept(self) -> bool:
        """Behind the call: whether somebody still has a sent tensor, to compute with later on."""
        return any(torch._C._storage_Use_Count(one._cdata) > 1 for one in self._storages)

    def add(
        self,
        target: Target,
        done: Iterable[tuple[Source | None, Piece]],
        boxes: Iterable[int],
    ) -> None:
        """Writes into a target, as they were done.

        Args:
            done: each with the sent tensor that it is a view of; None if that came in another call.
            boxes: numbers of what was written.
        """
        fields, positions = array("q"), array("q")
        for source, one in done:
            if source is None:
                self._sources.leave_native((), APART)
                return
            row = self._row(source, one)
            if row is None:
                self._sources.leave_native((), "the kernels don't know how to write it")
                return
            fields.extend(row)
            positions.append(source.position)
        if not target.is_repeatable:
            self._sources.leave_native((), "experts may move to other ranks while serving")
        each = array("q", [one for box in boxes for one in (target.index, box)])
        self.extend(BucketRows(fields, positions, each))

    def add_fill(self, target: Target, write: Write, box: int) -> None:
        """A write of no sent tensor: the padding of a vocabulary."""
        self.fills.append((target, write))
        self.add(target, (), [box])

    def add_exponents(self, scale: Source) -> None:
        """A sent scale that has to consist of powers of two."""
        self.exponents.append(scale.position)

    def _row(self, source: Source, one: Piece) -> tuple[int, ...] | None:
        offset = source.offset_of(one.source)
        if offset is None:
            return None
        memory, start = self.bucket.place(source.position)
        return row_of(one, (memory, start + offset * one.source.element_size()))
