"""A bucket that was sent from another device is brought to the model's in one copy.

A trainer on a CPU, or one payload for all ranks of a node: the loaders and the kernels read local memory
afterwards, so such a bucket is recorded and replayed as any other, and by the recipe of any other.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from .bucket import Bucket, FlatBucket, TensorBucket

_ALIGNMENT = 16  # of a tensor in the copy: the kernels load 16 bytes at once


def on_device(bucket: Bucket, device: torch.device) -> Bucket:
    """`bucket` itself where all of it lies on `device`; else one whose tensors do.

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
