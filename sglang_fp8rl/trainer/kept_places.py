"""Places in memory where a trainer casts what it sends, kept from refit to refit, so that many are counted at once.

A fingerprint needs the codes of each tensor for the moment in which they are counted. Each tensor has its place for that,
beside those before and after it; a *group* has room together and is counted by one table, which stays as the
places do. The next group takes the same room. A tensor is read as it goes by and not later: an iterator may reuse its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..formats.format import BlockGrid
from ..numerics import FP8_DTYPE
from ..numerics.cast import cast_into
from ..numerics.fingerprint import Box, NumberTable, scaled_boxes, seed_of
from ..numerics.write_table import WIDE
from ..wire.bucket import aligned
from ..wire.plan import UNUSED, RefitPlan, TensorPlan
from ..wire.staging import free_bytes
from .fingerprint import Cast, Counted, Fingerprinter, form_as_served

ROOM = 256 << 20  # bytes on each device
_MOST = 1 << 20  # places; a sender of other shapes each time starts anew


@dataclass(eq=False)
class _Group:
    """Places that lie beside each other.

    Attributes:
        table: of all of `boxes`; None before it is made.
        written: which of them were since it was counted.
    """

    room: torch.Tensor
    used: int = 0
    counted: list[Counted] = field(default_factory=list)
    boxes: list[list[Box]] = field(default_factory=list)
    table: NumberTable | None = None
    written: set[int] = field(default_factory=set)
    casts: list[Cast] = field(default_factory=list)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        first = self.used
        self.used += _padded(shape, dtype)
        end = first + math.prod(shape) * dtype.itemsize
        return self.room[first:end].view(dtype).view(shape)

    def count(self, numbers: Fingerprinter) -> None:
        """Add what was written; on a GPU nothing waits for it. A table is kept for all of it, which most refits bring."""
        written = sorted(self.written)
        if len(written) < len(self.boxes):
            table = NumberTable([self.boxes[at] for at in written])
        else:
            table = self.table = self.table or NumberTable(self.boxes)
        [values] = table.start()
        numbers.add_counted([self.counted[at] for at in written], values, self.casts)
        self.forget()

    def forget(self) -> None:
        """What was written, for it is counted, or its refit failed."""
        self.written, self.casts = set(), []


@dataclass
class _Place:
    """Where one tensor goes, and its number in its group; `made` is of its own dtype, or codes and scales."""

    group: _Group
    at: int
    made: list[torch.Tensor]
    grid: BlockGrid | None


class KeptPlaces:
    """The places of one plan's tensors, for one update at a time; they hold `ROOM` bytes on each device as long as this is."""

    def __init__(self, plan: RefitPlan) -> None:
        self.plan = plan
        self._places: dict[tuple, _Place | None] = {}
        self._rooms: dict[torch.device, torch.Tensor] = {}
        self._group: _Group | None = None  # that of the tensor before
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # of what was enqueued last

    def watch(
        self, named_tensors: Iterable[tuple[str, Any]], numbers: Fingerprinter
    ) -> Iterator[tuple[str, Any]]:
        """Pass full tensors on, adding each as `Fingerprinter.add` does, but for NaN and Inf, which it may raise later."""
        try:
            for name, tensor in named_tensors:
                self._add(name, tensor.detach(), numbers)
                yield name, tensor
            self._count(numbers)
        finally:
            if self._group is not None:
                self._group.forget()
            self._group = None

    def _add(self, name: str, tensor: torch.Tensor, numbers: Fingerprinter) -> None:
        key = (name, tensor.shape, tensor.dtype, tensor.device)
        if key not in self._places:
            if len(self._places) >= _MOST:
                self._places.clear()
            with torch.inference_mode(False):  # else no other mode could write there
                self._places[key] = self._place_of(name, tensor)
        place = self._places[key]
        if place is None:
            numbers.add(name, tensor)
            return
        if place.group is not self._group or place.at in place.group.written:
            self._count(numbers)  # the next group takes its room
            self._group = place.group
        self._take_turn(tensor.device)
        if place.grid is None:
            place.made[0].copy_(tensor)
        else:
            codes, scales = place.made
            bad = cast_into(
                tensor, codes, scales, place.grid.block, name=name, **self.plan.rounding
            )
            place.group.casts.append((name, place.grid, bad))
        place.group.written.add(place.at)

    def _count(self, numbers: Fingerprinter) -> None:
        if self._group is not None and self._group.written:
            self._take_turn(self._group.room.device)
            self._group.count(numbers)

    def _take_turn(self, device: torch.device) -> None:
        """What is enqueued now comes behind what was enqueued before: an iterator may change the stream of who consumes it."""
        if device.type == "cuda":
            now = torch.cuda.current_stream(device)
            if self._streams.setdefault(device, now) != now:
                now.wait_stream(self._streams[device])
                self._streams[device] = now

    def _place_of(self, name: str, tensor: torch.Tensor) -> _Place | None:
        """A new one beside the tensor before, or in a new group; None where `Fingerprinter` is to look at it by itself."""
        entry = self.plan.tensors.get(name)
        if entry is None or not _has_a_place(entry, tensor):
            return None
        shape, start = tuple(tensor.shape), (0,) * tensor.dim()
        parts: list[tuple[tuple[int, ...], torch.dtype]] = [(shape, FP8_DTYPE)]
        grid = None
        if entry.block_size is None:
            parts = [(shape, getattr(torch, entry.dtype))]
        else:
            grid = BlockGrid.of(shape, entry.block_size, name)
            parts.append((grid.scale_shape, torch.float32))
        size = sum(_padded(*part) for part in parts)
        if size > ROOM:
            return None
        group, device = self._group, tensor.device
        if group is None or group.room.device != device or group.used + size > ROOM:
            if device not in self._rooms:
                if device.type == "cuda" and (free_bytes(device) or 0) < ROOM:
                    return None
                self._rooms[device] = torch.empty(ROOM, dtype=torch.uint8, device=device)
            group = _Group(self._rooms[device])
        made = [group.take(*part) for part in parts]
        if grid is None:
            group.boxes.append([Box(made[0], shape, start, seed_of(name))])
        else:
            group.boxes.append(scaled_boxes(name, made[0], made[1:], shape, start, grid.block))
        group.counted.append((name, form_as_served(entry), tensor.numel()))
        group.table = None
        return _Place(group, len(group.boxes) - 1, made, grid)


def _has_a_place(entry: TensorPlan, tensor: torch.Tensor) -> bool:
    """Whether it is a matrix to be cast, or what is stored in high precision."""
    is_full = tensor.shape == entry.shape and tensor.dtype in WIDE and tensor.numel() > 0
    return is_full and entry.scheme != UNUSED and (entry.block_size is None or tensor.dim() == 2)


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return aligned(math.prod(shape) * dtype.itemsize)
