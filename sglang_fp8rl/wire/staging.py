"""Two buffers that buckets are sent in, in turn: one is filled while the server reads the other.

A fresh buffer for every bucket is a fresh handle for every bucket: of a 30B model in 512 MiB, 120 that
the server opens and closes in every refit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

COUNT = 2


@dataclass(eq=False)
class Lease:
    """A buffer that the server may be reading until `end` is called.

    Attributes:
        memory: uint8, as long as was asked for.
    """

    memory: torch.Tensor
    end: Callable[[], None]


@dataclass
class _Ring:
    """The buffers of one device."""

    buffers: list[torch.Tensor | None] = field(default_factory=lambda: [None] * COUNT)
    leased: set[int] = field(default_factory=set)
    turn: int = 0


class StagingBuffers:
    """Two buffers for each device that buckets come from; made anew where one is too small.

    Args:
        allocate: uint8 memory of a size on a device, of which other processes can be given handles.
        least: bytes of a new buffer at least, so that buckets of about one size fit in what is there.
    """

    def __init__(
        self, allocate: Callable[[int, torch.device], torch.Tensor], least: int = 0
    ) -> None:
        self._allocate, self.least = allocate, least
        self._rings: dict[torch.device, _Ring] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int, device: torch.device) -> Lease:
        """The buffer that was not taken last.

        Raises:
            RuntimeError: its bucket was not answered for, so somebody may be reading it.
        """
        with self._lock:
            ring = self._rings.setdefault(device, _Ring())
            number = ring.turn
            if number in ring.leased:
                raise RuntimeError(f"{COUNT} buckets on {device} wait for an answer, none is free")
            memory = ring.buffers[number]
            if memory is None or memory.numel() < nbytes:
                ring.buffers[number] = memory = None  # the old one goes before the new one comes
                memory = self._allocate(max(nbytes, self.least), device)
                ring.buffers[number] = memory
            ring.leased.add(number)
            ring.turn = (number + 1) % COUNT
        return Lease(memory[:nbytes], lambda: ring.leased.discard(number))
