"""One trainer rank's weights as flattened buckets, each under a text layout."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.weight_sync.utils import _preprocess_tensor_for_update_weights
from verl.utils.device import get_device_id
from verl.workers.rollout.sglang_rollout.utils import get_named_tensor_buckets

from ..errors import RefitError
from ..wire.bucket import Payload, payload_of

FLATTENED = "flattened_bucket"


class FlatBuckets:
    """Args:
    weights: named tensors, as veRL hands them to each rank.
    bucket_bytes: a bucket ends before the tensor that would pass this size.
    """

    def __init__(self, weights: Any, bucket_bytes: int) -> None:
        # What SGLang does before it pickles: handles of CUDA memory name the GPU, not its number.
        monkey_patch_torch_reductions()
        self._buckets = get_named_tensor_buckets(weights, bucket_bytes)
        self._payload: Payload | None = None  # stays alive until the next is asked for

    async def next_text(self) -> str | None:
        """The next bucket for the server, which reads it out of this process; None at the end."""
        bucket = await anext(self._buckets, None)
        if bucket is None:
            return None
        named = [(_plain_name(name), _local(tensor)) for name, tensor in bucket]
        self._payload = payload_of(named, FLATTENED, ranks=1, layout_as_text=True)
        return self._payload.texts[0]


def is_the_end(texts: list[Any]) -> bool:
    """Whether no rank has a bucket any more.

    Args:
        texts: of all ranks: a bucket, None, or the `RefitError` that it met.

    Raises:
        RefitError: a rank could not make its own, or has fewer than the others.
    """
    failed = next((text for text in texts if isinstance(text, RefitError)), None)
    if failed is not None:
        raise failed
    ended = [rank for rank, text in enumerate(texts) if text is None]
    if ended and len(ended) < len(texts):
        raise RefitError(
            "a refit",
            f"rank(s) {ended} of {len(texts)} have no more tensors, the others have",
            "every rank of a server's group is given the same tensors",
            "Check what the trainer hands to update_weights on these ranks.",
        )
    return bool(ended)


def _plain_name(name: str) -> str:
    """veRL wraps layers under LoRA; the server knows no `base_layer`."""
    return name.replace(".base_layer.", ".")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """On the device whose memory the server can read, as veRL sends it."""
    full = _preprocess_tensor_for_update_weights(tensor.detach())
    return full.to(get_device_id()) if full.device.type == "cpu" else full
