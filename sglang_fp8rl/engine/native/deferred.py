"""Writes that SGLang's loaders leave to a table: all of a bucket are done together, as its recipe will do them.

They wait while nothing is seen in a call but loaders that copy. Before anything else looks at the model's memory, or
writes there or into what was sent, they are done, and no more wait in that call; nor behind its last tensor.
"""

from __future__ import annotations

import functools
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NamedTuple

import numpy as np
import torch

from ...config import Options
from ...errors import RefitError, listed
from ...numerics.backends import make_runner
from ...numerics.write_table import FIELD, ROW_FIELDS, CastTable
from ..arrival.bucket import Bucket, overlapping
from ..arrival.sent_tensors import Source
from ..interception import storage_of, unwatched
from ..ledger.ledger import Ledger
from ..model.parameters import Target
from .learned import Rows
from .recording import BucketRows, Recording

# Tensors of a call. A table costs as much as a few writes by themselves.
FEWEST = 8


class Deferred(NamedTuple):
    """What one loader would write of (a view of) a sent tensor, which begins at that address of its storage."""

    target: Target
    rows: Rows
    source: Source
    address: int
    storage: torch.UntypedStorage


class DeferredWrites:
    """Those of one call, whose tensors stay where they are until it ends.

    Args:
        device: of all parameters.
        bucket, lane, not_finite, raised, recording: as of the call.
    """

    def __init__(
        self,
        ledger: Ledger,
        options: Options,
        device: torch.device,
        bucket: Bucket,
        lane: Callable[[], AbstractContextManager[None]],
        not_finite: list[tuple[str, torch.Tensor]],
        raised: dict[tuple, tuple[str, str]],
        recording: Recording | None,
    ) -> None:
        self._ledger, self._options, self._device = ledger, options, device
        self._bucket, self._lane, self._recording = bucket, lane, recording
        self._not_finite, self._raised = not_finite, raised
        self._waiting: list[Deferred] = []
        # Storages that they go to, and that they come from.
        self._written_to: set[int] = set()
        self._read_from: set[int] = set()
        self._layouts: dict[tuple[int, ...], tuple] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def layout_of(self, target: Target) -> tuple:
        """Where it lies by now."""
        scale = 0 if target.scale is None else target.scale.data_ptr()
        where = target.index, target.parameter.data_ptr(), scale
        layout = self._layouts.get(where)
        if layout is None:
            layout = self._layouts[where] = target.layout
        return layout

    def add(self, one: Deferred) -> bool:
        """Take it; False where it has to be done at once."""
        to, of = _storages_of(one.target), one.storage._cdata
        with self._lock:
            if self._is_closed or of in self._written_to or not to.isdisjoint(self._read_from):
                return False
            self._waiting.append(one)
            self._written_to |= to
            self._read_from.add(of)
            return True

    @contextmanager
    def until_end_of(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """In here writes may wait; yields the pairs, and behind the last one nothing waits any more."""
        try:
            yield self._passed_on(weights)
        except BaseException:
            with suppress(Exception):  # it is in `raised`, and the first error is the one to tell
                self.close()
            raise
        self.close()

    def _passed_on(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights
        self.close()

    def close_for(self, target: Target, sources: Iterable[torch.Tensor] = ()) -> None:
        """Close, if it makes a difference to what waits, or to a write into the memory of `target` of these."""
        to, of = _storages_of(target), set(map(storage_of, sources))
        if not (
            to.isdisjoint(self._written_to | self._read_from) and of.isdisjoint(self._written_to)
        ):
            self.close()

    def waits_for(self, tensor: torch.Tensor) -> bool:
        """Whether anything waits for the memory of this tensor."""
        return storage_of(tensor) in self._written_to

    def close(self) -> None:
        """Do what waits, and let nothing wait from now on. Waits for a GPU.

        Raises:
            RefitError: it could not be done; `raised` says so too, for the model may catch this.
        """
        with self._lock, unwatched(), self._lane():
            self._is_closed = True
            waiting, self._waiting = self._waiting, []
            try:
                self._write_all(waiting)
            except Exception as error:
                names = list(dict.fromkeys(one.source.name for one in waiting))
                for name in names:
                    self._raised["a table", name] = name, str(_failed_error([name], error))
                raise _failed_error(names, error) from error

    def _write_all(self, waiting: list[Deferred]) -> None:
        """Do all of these; what is done is no more among them."""
        if waiting and self._may_be_together(waiting, rows := self._rows_of(waiting)):
            self._write(rows)
            waiting.clear()
        while waiting:  # the last one stays
            self._write(self._rows_of(waiting[:1]))
            del waiting[0]

    def _rows_of(self, waiting: Sequence[Deferred]) -> BucketRows:
        fields, places, positions, boxes = bytearray(), array("q"), array("q"), array("q")
        number_of = self._ledger.coverage.number_of
        for target, rows, source, address, _ in waiting:
            memory, start = self._bucket.place(source.position)
            fields += rows.fields
            places.extend((memory, start + address - source.address) * rows.size)
            positions.extend([source.position] * rows.size)
            for region in rows.regions:
                boxes.extend((target.index, number_of(target.index, region)))
        table = np.frombuffer(fields, np.int64).reshape(-1, ROW_FIELDS)
        first, behind = FIELD["source"], FIELD["source_offset"] + 1
        table[:, first:behind] += np.array(places, np.int64).reshape(-1, 2)
        return BucketRows(array("q", fields), positions, boxes)

    @functools.cached_property
    def _addresses(self) -> np.ndarray:
        return np.array(self._bucket.addresses(), np.int64)

    def _may_be_together(self, waiting: Sequence[Deferred], rows: BucketRows) -> bool:
        """Whether no two of them write to one place, so that it makes no difference which is first."""
        parameters = list({one.target.index: one.target.parameter for one in waiting}.values())
        is_twice = self._ledger.coverage.overlap(rows.boxes[:, 1])
        return not (is_twice or overlapping(parameters).any())

    def _write(self, rows: BucketRows) -> None:
        fields, source, offset = rows.fields, FIELD["source"], FIELD["source_offset"]
        # Absolute: where rows are done one by one, each would bring the addresses of all.
        fields[:, offset] += self._addresses[fields[:, source]]
        fields[:, source] = 0
        coverage, boxes, table = self._ledger.coverage, rows.boxes, CastTable(fields, ())
        if len(table.pieces):
            runner = make_runner(
                table,
                self._device,
                pow2_scale=self._options.use_weight_pow2_scale,
                round_to_bf16=self._options.round_to_bf16,
            )
            assert runner is not None  # each of them was asked for its kernel
            flags = runner.run([0])
            for piece in table.bad_pieces(flags) if flags.any() else ():
                bad = torch.from_numpy(table.flags_of(flags, piece).astype(bool))
                self._not_finite.append((self._bucket.names[rows.positions[piece]], bad))
        coverage.write(np.unique(boxes[:, 0]), boxes[:, 1], self._ledger.stamp)
        if self._recording is not None:
            self._recording.extend(rows)


def _storages_of(target: Target) -> set[int]:
    held = target.parameter, target.scale
    return {storage_of(part) for part in held if part is not None}


def _failed_error(names: Sequence[str], error: Exception) -> RefitError:
    return RefitError(
        listed(names),
        f"{type(error).__name__}: {error}",
        "what loaders write of a bucket is written together, and this failed",
        "Look at the server's log and memory, then send the update again, whole.",
    )
