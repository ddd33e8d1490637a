"""Two buffers that buckets are sent in, in turn: one is filled while the server reads the other.

A fresh buffer for every bucket is a fresh handle for every bucket: of a 30B model in 512 MiB, 120 that
the server opens and closes in every refit.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import torch

COUNT = 2


class StagingBuffers:
    """`COUNT` buffers for each device that buckets come from; made anew where one is too small.

    A sender makes the next bucket while one is on its way, and no more: the buffer that it takes is then that of a
    bucket which was answered for.

    Args:
        allocate: uint8 memory of a size on a device, of which other processes can be given handles.
        least: bytes of a new buffer at least, so that buckets of about one size fit in what is there.
    """

    def __init__(
        self, allocate: Callable[[int, torch.device], torch.Tensor], least: int = 0
    ) -> None:
        self._allocate, self.least = allocate, least
        self._buffers: defaultdict[torch.device, deque[torch.Tensor | None]]
        self._buffers = defaultdict(lambda: deque([None] * COUNT))

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """uint8 [nbytes] of the buffer that was taken longest ago."""
        buffers = self._buffers[device]
        memory = buffers.popleft()
        if memory is None or memory.numel() < nbytes:
            memory = None  # the old one goes before the new one comes
            memory = self._allocate(max(nbytes, self.least), device)
        buffers.append(memory)
        return memory[:nbytes]
