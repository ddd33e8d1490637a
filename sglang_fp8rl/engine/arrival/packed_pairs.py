"""Pairs that came as one tensor (`pair_format.py`), taken apart before anything else looks at them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...errors import RefitError
from ...wire.pair import PAIR_SUFFIX, unpack_pair


def split_pairs(
    named_tensors: Iterable[tuple[str, torch.Tensor]], tensors: dict[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """Weights and scales under their own names; everything else as it came.

    Args:
        tensors: of the plan document.

    Raises:
        RefitError: a pair of a weight that the plan does not hold in FP8, or of another shape.
    """
    split: list[tuple[str, torch.Tensor]] = []
    for sent_name, tensor in named_tensors:
        if not sent_name.endswith(PAIR_SUFFIX):
            split.append((sent_name, tensor))
            continue
        name = sent_name.removesuffix(PAIR_SUFFIX)
        entry = tensors.get(name, {})
        wire = entry.get("wire", {})
        if "scale" not in wire:
            raise RefitError(
                sent_name,
                f"codes and scales for {entry.get('scheme', 'a name that no parameter takes')}",
                "only a weight that is served in FP8 comes as a pair",
                "Quantize with this server's plan (fetch_plan); nothing of this call was stored.",
            )
        shape, scale_shape = tuple(entry["shape"]), tuple(wire["scale_shape"])
        codes, scale = unpack_pair(name, tensor, shape, scale_shape)
        split += [(name, codes), (wire["scale"], scale)]
    return split
