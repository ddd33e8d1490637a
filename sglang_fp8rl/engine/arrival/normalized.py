"""A bucket as everything else expects it: on the model's device, in memory that stays."""

from __future__ import annotations

from itertools import accumulate

import torch

from ...wire.staging import COUNT
from .bucket import Bucket, FlatBucket, TensorBucket

_ALIGNMENT = 16  # of a tensor in the copy: the kernels load 16 bytes at once


def on_device(bucket: Bucket, device: torch.device) -> Bucket:
    """`bucket` itself where all of it lies on `device`; else one whose tensors do.

    A trainer on a CPU, or one payload for all ranks of a node: the loaders and the kernels read local
    memory afterwards, so such a bucket is recorded and replayed as any other, and by the recipe of any other.
    Takes memory of the bucket's size on `device` until the call ends, and for tensors that lie apart
    as much on the device they come from. One copy for each other device that tensors come from.
    """
    if bucket.devices == {device}:
        return bucket
    if isinstance(bucket, FlatBucket):
        return bucket.on_device(device)
    pairs = list(bucket)
    for other in bucket.devices - {device}:
        apart = [at for at, (_, tensor) in enumerate(pairs) if tensor.device == other]
        copies = _copied_together([pairs[at][1] for at in apart], device)
        for at, copy in zip(apart, copies, strict=True):
            pairs[at] = (pairs[at][0], copy)
    return TensorBucket(pairs)


def _copied_together(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Contiguous copies of tensors of one device, side by side in one buffer on another."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    starts = [0, *accumulate(sizes)]
    gathered = torch.empty(starts[-1], dtype=torch.uint8, device=tensors[0].device)
    for tensor, start in zip(tensors, starts, strict=False):
        _part(gathered, start, tensor).copy_(tensor)
    copied = gathered.to(device)
    return [_part(copied, start, tensor) for tensor, start in zip(tensors, starts, strict=False)]


def _part(buffer: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


class SenderMemory:
    """What a sender says that it will use again (`is_staged`), for each rank: open for the length of an update.

    A handle is closed with the last tensor that uses it. `RefitClient` sends bucket after bucket in the same
    two buffers, so each would be opened and closed again for every second bucket.
    """

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
