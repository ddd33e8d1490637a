"""The sender's staging buffers stay open here for the length of an update.

A handle is closed with the last tensor that uses it. `RefitClient` sends bucket after bucket in the same two
buffers, so each would be opened and closed again for every second bucket.
"""

from __future__ import annotations

import torch

from ...wire.staging import COUNT


class SenderMemory:
    """What a sender says that it will use again (`is_staged`), for each rank."""

    def __init__(self) -> None:
        self._open: dict[int, torch.UntypedStorage] = {}

    def __len__(self) -> int:
        return len(self._open)

    def hold(self, flat: torch.Tensor) -> None:
        """Keep this one and the one before it; everything that was read from it has been read.

        Waits for the device: the sender overwrites the memory once it is answered.
        """
        wait_for_reads(flat)
        storage = flat.untyped_storage()
        self._open.pop(storage.data_ptr(), None)
        self._open[storage.data_ptr()] = storage
        while len(self._open) > COUNT:
            del self._open[next(iter(self._open))]

    def release(self) -> None:
        """The update is over: the sender may have its memory back."""
        self._open.clear()


def wait_for_reads(flat: torch.Tensor) -> None:
    """Until everything that was asked of the device has been read from this memory."""
    if flat.device.type != "cpu":
        torch.get_device_module(flat.device).synchronize(flat.device)
