"""What SGLang's loaders do with each tensor of a bucket, recorded as rows of a table that does it again."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable

import numpy as np
import torch

from ...numerics.write_table import FIELD, ROW_FIELDS, Piece
from ..arrival.bucket import Bucket
from ..arrival.sent_tensors import Source, SourceIndex
from ..interception import Write
from ..model.parameters import Target
from ..native.call import APART
from ..native.deferred import DeferredRows
from ..native.matrix_writes import row_of


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
        self,
        target: Target,
        done: Iterable[tuple[Source | None, Piece]],
        boxes: Iterable[int],
    ) -> None:
        rows, positions = [], []
        for source, one in done:
            if source is None:
                self._sources.leave_native((), APART)
                return
            row = self._row(source, one)
            if row is None:
                self._sources.leave_native((), "the kernels don't know how to write it")
                return
            rows.append(row)
            positions.append(source.position)
        if not target.is_repeatable:
            self._sources.leave_native((), "experts may move to other ranks while serving")
        with self._lock:
            for row in rows:
                self._rows.extend(row)
            self._of_rows.extend(positions)
            for box in boxes:
                self._boxes.extend((target.index, box))

    def add_rows(self, rows: DeferredRows) -> None:
        places = [self.bucket.place(one.position) for one in rows.sources]
        starts = [one.address for one in rows.sources]
        fields = rows.fields.copy()
        fields[:, FIELD["source"]], at = np.array(places, np.int64).reshape(-1, 2).T
        fields[:, FIELD["source_offset"]] += at - np.array(starts, np.int64)
        with self._lock:
            self._rows.frombytes(fields.tobytes())
            self._of_rows.extend(one.position for one in rows.sources)
            self._boxes.frombytes(rows.boxes.tobytes())

    def add_fill(self, target: Target, write: Write, box: int) -> None:
        self.fills.append((target, write))
        self.add(target, (), [box])

    def add_exponents(self, scale: Source) -> None:
        self.exponents.append(scale.position)

    def _row(self, source: Source, one: Piece) -> tuple[int, ...] | None:
        offset = source.offset_of(one.source)
        if offset is None:
            return None
        memory, start = self.bucket.place(source.position)
        return row_of(one, (memory, start + offset * one.source.element_size()))
