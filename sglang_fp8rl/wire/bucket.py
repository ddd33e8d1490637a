"""Buckets: tensors that are sent together, in one flat memory of which a server gets a handle.

A server of this package reads their layout as one string (`layout_text`). Any other reads SGLang's
metadata by attribute, so sglang is not imported.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

from ..errors import RefitError
from ..formats import weight_name_of
from .gathering import copy_together, place_of
from .handles import serialize
from .layout_text import Columns
from .sendable import NamedTensor
from .stages import Mark
from .staging import FLAT, StagingBuffers, allocate, refuse_without_room
from .streams import StreamTurns

Place = TypeVar("Place", int, np.ndarray)
ALIGNMENT = 16  # a bucket is viewed as each tensor's dtype, so every tensor starts aligned


def aligned(place: Place) -> Place:
    """The first byte from there on at which a tensor may start; of each of them."""
    return -(-place // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Payload:
    """One bucket of so many tensors and bytes, serialized."""

    texts: list[str]  # one for each rank, to be read once: a handle counts its readers
    content: Any  # what they say, whose memory has to stay until the server answers
    tensors: int
    nbytes: int


class Bucket:
    """Tensors, one behind the other in uint8 memory of the first one's device. Those that stay (`add_all`) are copied together
    by `close`. Any other is copied when it is added, and may change from then on; on a GPU by what is enqueued behind that.

    How much comes is rarely known before. Where it is, or a staging buffer is there, a tensor is copied to its place; else by
    itself first, so that no more memory is shared than is filled.

    Args:
        limit: bytes; it ends before the tensor that would pass them.
        expected: bytes, where they are known.
        staging: whose memory to fill, for a server of this package, which has read all when it answers.

    Attributes:
        columns: where each tensor lies.
        marks: of the seconds until `close` ended, those that went into filling it.
    """

    marks: Sequence[Mark]

    def __init__(
        self, limit: int, expected: int = 0, staging: StagingBuffers | None = None
    ) -> None:
        self.columns = Columns([], [], [], [], [])
        self._limit, self._expected, self._staging = limit, expected, staging
        self._memory: torch.Tensor | None = None
        self._viewed: dict[torch.dtype, torch.Tensor] = {}
        # For these places, when there is memory.
        self._apart_starts, self._apart = list[int](), list[torch.Tensor]()
        self._device = torch.device("cpu")
        self._end, self._seconds, self._turns = 0, 0.0, StreamTurns()

    @classmethod
    def of(
        cls, named_tensors: Sequence[NamedTensor], staging: StagingBuffers | None = None
    ) -> Bucket:
        """One with all of these."""
        bucket = cls(0, 0, staging)
        for name, tensor in named_tensors:
            bucket.add(name, tensor)
        bucket.close(is_last=True)
        return bucket

    def takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether it may be added: the first always, and a scale behind its weight."""
        names = self.columns.names
        if not names or aligned(self._end) + tensor.nbytes <= self._limit:
            return True
        return weight_name_of(name) == names[-1]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor. Raises `RefitError` where there is no room in memory."""
        began, start = perf_counter(), aligned(self._end)
        if tensor.requires_grad or type(tensor) is not torch.Tensor:
            tensor = tensor.detach()
        self._end = start + tensor.nbytes
        if not self.columns.names:
            self._device = tensor.device
            self._turns.take(self._device)
            self._memory = self._memory_at_once()
        columns = self.columns
        columns.names.append(name)
        columns.shapes.append(tensor.shape)
        columns.dtypes.append(tensor.dtype)
        columns.starts.append(start)
        columns.ends.append(self._end)
        self._copy(start, tensor)
        self._seconds += perf_counter() - began

    def add_all(self, columns: Columns, tensors: list[torch.Tensor]) -> None:
        """Have these and no others, which keep their memory and values until `close`."""
        self.columns, self._apart_starts, self._apart = columns, columns.starts, tensors
        self._device, self._end = tensors[0].device, columns.ends[-1]

    def _copy(self, start: int, tensor: torch.Tensor) -> None:
        """Copy a tensor that may change, to its place if there is memory."""
        stream = its_stream = self._turns.take(self._device)
        if tensor.device != self._device:
            its_stream = self._turns.take(tensor.device)
        if self._memory is None or self._end > self._memory.numel():
            self._apart_starts.append(start)
            self._apart.append(tensor.clone(memory_format=torch.contiguous_format))
        else:
            self._place(self._memory, start, tensor).copy_(tensor)
            if self._memory.is_cuda:  # an update may end before this is done
                self._memory.record_stream(stream)
        if tensor.is_cuda:  # whoever made it may let go of it now
            tensor.record_stream(its_stream)

    def _place(self, memory: torch.Tensor, start: int, tensor: torch.Tensor) -> torch.Tensor:
        """As `place_of`, of the memory that tensors are added to, in one call where it can be."""
        if not tensor.is_contiguous():
            return place_of(memory, start, tensor.dtype, tensor.shape)
        viewed = self._viewed.get(tensor.dtype)
        if viewed is None:
            whole = memory[: memory.numel() // ALIGNMENT * ALIGNMENT]
            viewed = self._viewed[tensor.dtype] = whole.view(tensor.dtype)
        return viewed.as_strided(tensor.shape, tensor.stride(), start // tensor.itemsize)

    def close(self, *, is_last: bool) -> None:
        """Nothing more is added: all lies in one memory when this returns, and everything that was sent was read. Raises
        `RefitError` where there is no room for it.

        Args:
            is_last: of an update; else a staging buffer will be filled again, by about as much.
        """
        began = perf_counter()
        for device in {self._device, *(tensor.device for tensor in self._apart)}:
            self._turns.take(device)
        if self._memory is None or self._end > self._memory.numel():
            filled = None if self._memory is None else self._memory[: self._apart_starts[0]]
            wanted = 0 if is_last or self._staging is None else self._limit
            self._memory = self._new_memory(self._end, wanted, is_larger=filled is not None)
            if filled is not None:
                self._memory[: len(filled)].copy_(filled)
        copy_together(self._memory, self._apart_starts, self._apart)
        self._turns.wait()  # who has its handle open still waits for nothing
        self._apart, self._viewed = [], {}
        now = perf_counter()
        self.marks = [("filling", began - self._seconds), ("making_handles", now)]

    def _memory_at_once(self) -> torch.Tensor | None:
        """Memory for the first tensor and those behind it; None where it is not known how much will come."""
        if self._staging is not None and self._staging.are_made(self._device):
            return self._new_memory(self._end, self._limit)
        wanted = min(self._limit, self._expected)
        if wanted and wanted >= self._end:
            return self._new_memory(self._end, wanted)
        refuse_without_room(self._end, self._device)
        return None

    def _new_memory(self, nbytes: int, wanted: int, *, is_larger: bool = False) -> torch.Tensor:
        if self._staging is None:
            return allocate(nbytes, self._device, wanted)
        return self._staging.take(nbytes, self._device, wanted, is_larger=is_larger)

    @property
    def flat(self) -> torch.Tensor:
        """What was filled."""
        assert self._memory is not None
        return self._memory[: self._end]

    def tensor(self, at: int) -> NamedTensor:
        """One of them, where it was copied."""
        of = self.columns
        return of.names[at], place_of(self.flat, of.starts[at], of.dtypes[at], of.shapes[at])

    @functools.cached_property
    def metadata(self) -> list[SimpleNamespace]:
        """Where each tensor lies, in SGLang's words, once all were added."""
        return self.columns.flat_tensors()

    @functools.cached_property
    def layout(self) -> str:
        """Where each tensor lies, once all were added."""
        return self.columns.to_text()

    def payload(self, ranks: int, layout_as_text: bool) -> Payload:
        """For all ranks of a server, `layout_as_text` only for one of this package."""
        flat = self.flat
        layout = self.layout if layout_as_text else self.metadata
        named = {FLAT: flat} if self._staging is None else self._staging.reference(len(flat))
        content: dict[str, Any] = {**named, "metadata": layout}
        # A handle is for one reader; without one all ranks read the same text.
        texts = [serialize(content) for _ in range(ranks if FLAT in content else 1)]
        nbytes = sum(self.columns.ends) - sum(self.columns.starts)
        return Payload(texts * (ranks // len(texts)), content, len(self.columns.names), nbytes)


def buckets_of(
    named_tensors: Iterable[NamedTensor],
    limit: int,
    expected: int = 0,
    staging: StagingBuffers | None = None,
) -> Iterator[tuple[Bucket, bool]]:
    """Buckets of up to `limit` bytes, and whether each is the last. A tensor is read as it goes by: the memory that it
    has may be used for the next. Raises `RefitError` if a name comes twice, or as `Bucket.add`.

    Args:
        expected: bytes of all of them; 0 where that is not known.
        staging: as of `Bucket`.
    """
    seen: set[str] = set()
    bucket = Bucket(limit, expected, staging)
    for name, tensor in named_tensors:
        if name in seen:
            raise RefitError(
                name,
                "yielded twice",
                "an update names each tensor once",
                "Look at what the trainer's iterator yields; the update was ended there.",
            )
        seen.add(name)
        if not bucket.takes(name, tensor):
            bucket.close(is_last=False)
            yield bucket, False
            expected -= len(bucket.flat)
            bucket = Bucket(limit, max(0, expected), staging)
        bucket.add(name, tensor)
        del tensor  # the next one may take its place
    if bucket.columns.names:
        bucket.close(is_last=True)
        yield bucket, True
