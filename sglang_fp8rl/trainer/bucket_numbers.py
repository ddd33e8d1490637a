"""The numbers of what a refit sends, counted bucket by bucket while the server loads it.

A fingerprint needs the codes of a tensor for the moment in which they are counted. As many tensors of a bucket as have
room together are cast there by one table and counted by another. Both stay, for a layout comes again with each refit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..formats.format import BlockGrid
from ..numerics import FP8_DTYPE
from ..numerics.backends import TableRunner, make_runner
from ..numerics.cast import as_matrix, refuse_not_finite
from ..numerics.fingerprint import Box, NumberTable, scaled_boxes, seed_of, whole
from ..numerics.write_table import CastTable, Kind, Piece
from ..wire.bucket import Bucket, aligned
from ..wire.plan import UNUSED, RefitPlan, TensorPlan
from ..wire.staging import free_bytes
from .fingerprint import Counted, Fingerprinter, form_as_served

ROOM = 256 << 20  # bytes on each device, at most
_MOST = 1 << 18  # tensors of all layouts; a sender of other ones each time starts anew


@dataclass(eq=False)
class _Group:
    """Tensors of a bucket that have room together.

    Attributes:
        positions: of them in the bucket.
        grids: of each, the blocks (or rows) that may be not finite.
        rows: of the table that writes them there, as the server stores them.
        boxes: what of the room is theirs.
        writer, counter: None before `close`.
    """

    room: torch.Tensor
    end: int = 0
    positions: list[int] = field(default_factory=list)
    counted: list[Counted] = field(default_factory=list)
    grids: list[BlockGrid] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    boxes: list[list[Box]] = field(default_factory=list)
    writer: TableRunner | None = None
    counter: NumberTable | None = None

    def add(self, entry: TensorPlan, bucket: Bucket, at: int) -> bool:
        """Add the tensor at that position; False where it has no room, or no kernel takes it."""
        (name, tensor), made, end = bucket.tensor(at), list[torch.Tensor](), self.end
        matrix = as_matrix(tensor)
        assert matrix is not None  # a bucket's tensors are contiguous
        is_cast = entry.block_size is not None
        grid = BlockGrid.of(matrix.shape, entry.block_size or (1, None), name)
        parts = [(tensor.shape, FP8_DTYPE if is_cast else getattr(torch, entry.dtype))]
        parts += [(torch.Size(grid.scale_shape), torch.float32)] if is_cast else []
        for shape, dtype in parts:
            start = aligned(end)
            end = start + shape.numel() * dtype.itemsize
            if end > len(self.room):
                return False
            made.append(self.room[start:end].view(dtype).view(shape))
        boxes, scales, kind = [whole(made[0], seed_of(name))], None, Kind.COPY
        if is_cast:
            scales, kind = made[1], Kind.CAST
            boxes = scaled_boxes(name, made[0], [scales], tuple(tensor.shape), (0, 0), grid.block)
        piece = Piece(matrix, made[0].view(matrix.shape), scales, grid.block, kind)
        if not piece.fits():
            return False
        self.end = end
        self.positions.append(at)
        self.counted.append((name, form_as_served(entry), tensor.numel()))
        self.grids.append(grid)
        self.rows.append(piece.row((0, bucket.metadata[at].start_idx)))
        self.boxes.append(boxes)
        return True

    def close(self, rounding: dict[str, Any]) -> bool:
        """All are added; False where there are no kernels for them."""
        table = CastTable(np.array(self.rows, np.int64), (self.room,))
        self.writer = make_runner(table, self.room.device, **rounding)
        self.counter = NumberTable(self.boxes)
        return self.writer is not None

    def count(self, memory: torch.Tensor, numbers: Fingerprinter) -> None:
        """Add the numbers of what lies in a bucket's memory, which is read when this returns. Raises `QuantizationError`
        for NaN or Inf."""
        assert self.writer is not None
        assert self.counter is not None
        flags, table = self.writer.run([memory.data_ptr()]), self.writer.table
        for at in table.bad_pieces(flags) if flags.any() else ():
            bad = torch.from_numpy(table.flags_of(flags, at).astype(bool))
            refuse_not_finite(bad, self.grids[at], self.counted[at][0])
        [values] = self.counter.start()
        numbers.add_counted(self.counted, values)


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
            room = self._room_for(bucket)
            self._layouts[key] = self._laid_out(bucket, room)
        groups, alone = self._layouts[key]
        for group in groups:
            group.count(memory, numbers)
        for at in alone:
            numbers.add(*bucket.tensor(at))

    def _room_for(self, bucket: Bucket) -> torch.Tensor:
        """Memory for what is stored of a bucket, or for some of it at a time; where it is new, so are all layouts."""
        device = bucket.flat.device
        wanted, room = min(ROOM, 2 * len(bucket.flat)), self._rooms.get(device)
        laid_out = sum(len(group.rows) for groups, _ in self._layouts.values() for group in groups)
        if room is None or len(room) < wanted or laid_out > _MOST:
            self._layouts.clear()
            self._rooms.pop(device, None)
            room = None  # the old one goes before the new one comes
            free = free_bytes(device) if device.type == "cuda" else None
            wanted = wanted if free is None or wanted <= free else 0
            room = self._rooms[device] = torch.empty(wanted, dtype=torch.uint8, device=device)
        return room

    def _laid_out(self, bucket: Bucket, room: torch.Tensor) -> tuple[list[_Group], list[int]]:
        """Its groups; and the positions of tensors that `Fingerprinter` is to look at one by one."""
        groups, alone = [_Group(room)], list[int]()
        for at in range(len(bucket.metadata)):
            name, tensor = bucket.tensor(at)
            entry = self.plan.tensors.get(name)
            if entry is None or not _is_cast_or_copied(entry, tensor):
                alone.append(at)
            elif not groups[-1].add(entry, bucket, at):
                groups.append(_Group(room))
                if not groups[-1].add(entry, bucket, at):
                    alone.append(at)
        groups = [group for group in groups if group.positions]
        closed = [group for group in groups if group.close(self.plan.rounding)]
        alone += [at for group in groups if group not in closed for at in group.positions]
        return closed, alone


def _is_cast_or_copied(entry: TensorPlan, tensor: torch.Tensor) -> bool:
    """Whether the server stores all of it, as a matrix in FP8 or in high precision."""
    is_full = tensor.shape == entry.shape and entry.scheme != UNUSED and tensor.numel() > 0
    return is_full and (entry.block_size is None or tensor.dim() == 2)
