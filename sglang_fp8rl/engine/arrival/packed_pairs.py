"""Pairs that came as one tensor (`wire/pair.py`), taken apart before anything else looks at them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import methodcaller

import torch

from ...errors import RefitError
from ...wire.pair import PAIR_SUFFIX, unpack_pair
from ...wire.plan import TensorPlan
from .bucket import Bucket

_is_packed = methodcaller("endswith", PAIR_SUFFIX)


def has_packed_pairs(bucket: Bucket) -> bool:
    """Whether a weight and its scale come as one tensor in it."""
    return any(map(_is_packed, bucket.names))


def split_pairs(
    named_tensors: Iterable[tuple[str, torch.Tensor]], tensors: Mapping[str, TensorPlan]
) -> list[tuple[str, torch.Tensor]]:
    """Weights and scales under their own names; everything else as it came.

    Args:
        tensors: of the plan, by name.

    Raises:
        RefitError: a pair of a weight that the plan does not hold in FP8, or of another shape.
    """
    split: list[tuple[str, torch.Tensor]] = []
    for sent_name, tensor in named_tensors:
        if not sent_name.endswith(PAIR_SUFFIX):
            split.append((sent_name, tensor))
            continue
        name = sent_name.removesuffix(PAIR_SUFFIX)
        entry = tensors.get(name)
        if entry is None or not entry.is_fp8_on_wire:
            raise RefitError(
                sent_name,
                f"codes and scales for {entry.scheme if entry else 'a name that no parameter takes'}",
                "only a weight that is served in FP8 comes as a pair",
                "Quantize with this server's plan (fetch_plan); nothing of this call was stored.",
            )
        assert entry.shape is not None
        codes, scale = unpack_pair(name, tensor, entry.shape, entry.scale_shape)
        split += [(name, codes), (entry.scale_name, scale)]
    return split
