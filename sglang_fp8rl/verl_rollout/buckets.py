"""What veRL hands to one rank, as flattened buckets for a server; and those of all ranks together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch
from sglang.srt.weight_sync.utils import _preprocess_tensor_for_update_weights
from verl.utils.device import get_device_id
from verl.workers.rollout.utils import ensure_async_iterator

from ..errors import RefitError
from ..wire.bucket import Bucket


async def flat_buckets(
    weights: Any, bucket_bytes: int, layout_as_text: bool
) -> AsyncIterator[tuple[str, bool]]:
    """Each bucket for the server, which reads it out of this process until the next is asked for; and whether
    it is the last. It ends before the tensor that would pass `bucket_bytes`."""
    bucket = Bucket(bucket_bytes)
    async for given, tensor in ensure_async_iterator(weights):
        # veRL wraps layers under LoRA; the server knows no `base_layer`.
        name, tensor = given.replace(".base_layer.", "."), _local(tensor)
        if not bucket.takes(name, tensor):
            bucket.close(is_last=False)
            yield bucket.payload(1, layout_as_text).texts[0], False
            bucket = Bucket(bucket_bytes, bucket_bytes)
        bucket.add(name, tensor)
        del tensor  # the next one may take its place
    if bucket.columns.names:
        bucket.close(is_last=True)
        yield bucket.payload(1, layout_as_text).texts[0], True


def of_all_ranks(said: Sequence[Any]) -> tuple[list[str], bool]:
    """The next bucket of every rank, and whether it is the last. Raises `RefitError` where a rank could not make its
    own, or has fewer than the others.

    Args:
        said: by rank: what `flat_buckets` gave, None behind its end, or the `RefitError` that it met.
    """
    failed = next((one for one in said if isinstance(one, RefitError)), None)
    if failed is not None:
        raise failed
    ended = [rank for rank, one in enumerate(said) if one is None or one[1]]
    if said.count(None) == len(said):
        rule = "it names at least one tensor"
        raise RefitError("a refit", "an empty iterable on every rank", rule, "Check the source.")
    if None in said or 0 < len(ended) < len(said):
        found = f"rank(s) {ended} of {len(said)} have no more tensors, the others have"
        rule = "every rank of a server's group is given the same tensors"
        remedy = "Check what the trainer hands to update_weights on these ranks."
        raise RefitError("a refit", found, rule, remedy)
    return [text for text, _ in said], bool(ended)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """On the device whose memory the server can read, as veRL sends it."""
    full = _preprocess_tensor_for_update_weights(tensor.detach())
    return full.to(get_device_id()) if full.device.type == "cpu" else full
