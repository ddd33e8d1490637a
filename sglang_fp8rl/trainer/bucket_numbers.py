"""The numbers of what a refit sends, counted bucket by bucket while the server loads it.

A fingerprint needs the codes of a tensor for the moment in which they are counted. As many tensors of a bucket as have
room together are cast there by one table and counted by another. Both stay, for a layout comes again with each refit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..formats.format import BlockGrid
from ..numerics import FP8_DTYPE
from ..numerics.backends import TableRunner, has_kernel, make_runner
from ..numerics.cast import as_matrix
from ..numerics.fingerprint import MASK, Box, NumberTable, scaled_boxes, seed_of, whole
from ..numerics.write_table import CastTable, Kind, Piece
from ..wire.bucket import Bucket, aligned
from ..wire.fingerprint import Number
from ..wire.plan import UNUSED, RefitPlan, TensorPlan
from ..wire.staging import free_bytes
from .fingerprint import Fingerprinter, form_as_served

ROOM = 256 << 20  # bytes on each device, at most
_UPDATES = 4  # layouts of about so many are kept; a sender that cuts each otherwise begins anew


@dataclass(eq=False)
class _Group:
    """Tensors of a bucket that have room together.

    Attributes:
        counted: of each its name, its form and how many elements it has.
        rows: of the table that writes them there, as the server stores them.
        boxes: what of the room is theirs.
        writer, counter: there from `close` on.
        values: that are being counted: there from `start` on.
    """

    room: torch.Tensor
    end: int = 0
    counted: list[tuple[str, str, int]] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    boxes: list[list[Box]] = field(default_factory=list)
    writer: TableRunner = field(init=False)
    counter: NumberTable = field(init=False)
    values: torch.Tensor = field(init=False)

    def add(self, entry: TensorPlan, tensor: torch.Tensor, offset: int) -> bool:
        """Add the tensor at that byte of the bucket; False where it has no room."""
        name, made, end, grid = entry.name, list[torch.Tensor](), self.end, _grid_of(entry)
        parts = [(tensor.shape, _stored_dtype(entry))]
        if grid is not None:
            parts.append((torch.Size(grid.scale_shape), torch.float32))
        for shape, dtype in parts:
            start = aligned(end)
            end = start + shape.numel() * dtype.itemsize
            if end > len(self.room):
                return False
            made.append(self.room[start:end].view(dtype).view(shape))
        boxes = [whole(made[0], seed_of(name))]
        if grid is not None:
            boxes = scaled_boxes(name, made[0], made[1:], tuple(tensor.shape), (0, 0), grid.block)
        self.end = end
        self.counted.append((name, form_as_served(entry), tensor.numel()))
        self.rows.append(_piece_of(grid, tensor, *made).row((0, offset)))
        self.boxes.append(boxes)
        return True

    def close(self, rounding: dict[str, Any]) -> None:
        """All are added."""
        table = CastTable(np.array(self.rows, np.int64), (self.room,))
        writer = make_runner(table, self.room.device, **rounding)
        assert writer is not None  # each of them was asked for its kernel
        self.writer, self.counter = writer, NumberTable(self.boxes)

    def start(self, memory: torch.Tensor) -> None:
        """Count what lies in a bucket's memory. A GPU does that behind what is enqueued: groups follow each other in the same
        room, and are waited for together."""
        self.writer.start([memory.data_ptr()])
        [self.values] = self.counter.start()

    def finish(self, numbers: Fingerprinter) -> bool:
        """Add the numbers, and return whether all was finite; else none are added. The memory is read when this returns."""
        if self.writer.wait().any():
            return False
        for (name, form, numel), value in zip(self.counted, self.values.tolist(), strict=True):
            numbers.count(name, Number(form, value & MASK, numel))
        return True


class BucketNumbers:
    """Counts the buckets of one update at a time. It keeps room on each device that they lie on, up to `ROOM` bytes."""

    def __init__(self, plan: RefitPlan) -> None:
        self.plan = plan
        self._layouts: dict[tuple[str, torch.device], tuple[list[_Group], list[int]]] = {}
        self._rooms: dict[torch.device, torch.Tensor] = {}

    def add(self, numbers: Fingerprinter, bucket: Bucket) -> None:
        """Count a bucket as `Fingerprinter.add` does each of its tensors; nothing reads it any more when this returns.

        Raises:
            QuantizationError: NaN or Inf.
        """
        memory = bucket.flat
        key = (bucket.layout, memory.device)
        if key not in self._layouts:
            if sum(self._sizes()) > _UPDATES * len(self.plan.tensors):
                self._layouts.clear()
            with torch.inference_mode(False):  # else no other mode could write there
                self._layouts[key] = self._laid_out(bucket, self._room_on(memory.device))
        groups, alone = self._layouts[key]
        for group in groups:
            group.start(memory)
        are_finite = [group.finish(numbers) for group in groups]
        # One by one again where something is not finite: `Fingerprinter` raises for what that is.
        for at in alone if all(are_finite) else range(len(bucket.metadata)):
            numbers.add(*bucket.tensor(at))

    def _room_on(self, device: torch.device) -> torch.Tensor:
        """Room for what is stored of a bucket, or for some of it at a time."""
        if device not in self._rooms:
            free = free_bytes(device) if device.type == "cuda" else None
            nbytes = ROOM if free is None else min(ROOM, free // 2)
            self._rooms[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._rooms[device]

    def _sizes(self) -> Iterator[int]:
        """Of each layout, how many tensors it has."""
        for groups, alone in self._layouts.values():
            yield len(alone) + sum(len(group.rows) for group in groups)

    def _laid_out(self, bucket: Bucket, room: torch.Tensor) -> tuple[list[_Group], list[int]]:
        """Its groups; and the positions of tensors that `Fingerprinter` is to look at one by one."""
        groups, alone = [_Group(room)], list[int]()
        for at, meta in enumerate(bucket.metadata):
            name, tensor = bucket.tensor(at)
            entry = self.plan.tensors.get(name)
            if entry is None or not _is_known(entry, tensor):
                alone.append(at)
            elif not groups[-1].add(entry, tensor, meta.start_idx):
                groups.append(_Group(room))
                if not groups[-1].add(entry, tensor, meta.start_idx):
                    alone.append(at)
        groups = [group for group in groups if group.rows]
        for group in groups:
            group.close(self.plan.rounding)
        return groups, alone


def _stored_dtype(entry: TensorPlan) -> torch.dtype:
    return getattr(torch, entry.dtype) if entry.block_size is None else FP8_DTYPE


def _grid_of(entry: TensorPlan) -> BlockGrid | None:
    """The blocks of a matrix in FP8."""
    block, shape = entry.block_size, entry.shape
    return None if block is None or shape is None else BlockGrid.of(shape, block, entry.name)


def _piece_of(
    grid: BlockGrid | None,
    tensor: torch.Tensor,
    stored: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> Piece:
    """How a bucket's tensor is written to where it is stored, in FP8 with scales or as it is."""
    if grid is not None:
        return Piece(tensor, stored, scales, grid.block, Kind.CAST)
    source, target = as_matrix(tensor), as_matrix(stored)
    assert source is not None  # both are contiguous
    assert target is not None
    return Piece(source, target, block=(1, source.shape[1]))


def _is_known(entry: TensorPlan, tensor: torch.Tensor) -> bool:
    """Whether the server stores all of it, and kernels write that: a matrix in FP8, or anything in high precision."""
    if tensor.shape != entry.shape or entry.scheme == UNUSED:
        return False
    if entry.block_size is not None and tensor.dim() != 2:
        return False
    place = torch.empty(tensor.shape, dtype=_stored_dtype(entry), device="meta")
    piece = _piece_of(_grid_of(entry), tensor, place)
    return piece.fits() and has_kernel(tensor.device, piece.block, piece.source.shape[1])
