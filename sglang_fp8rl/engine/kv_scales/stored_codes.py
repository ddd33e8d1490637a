"""What lies in an FP8 KV cache: how much of e4m3's range it uses, on a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...numerics.reference import FP8_MAX
from .attention_layers import AttentionLayer

SAMPLED_SLOTS = 512  # SGLang hands out the lowest free slots
_MAGNITUDE, _LARGEST, _SMALLEST_NORMAL = 0x7F, 0x7E, 0x08


def stored_codes(pool: Any, layers: Sequence[AttentionLayer]) -> list[dict[str, Any]]:
    """Per layer, of keys and of values: `sampled` codes that are not zero, and of these the `saturated`
    share (448 or NaN), the `subnormal` share, and `unused` binades between the largest and 448.

    Reads a few slots of SGLang's pool: small kernels and one transfer, at a request for the status.
    """
    buffers = [
        buffer(layer.layer_id)[:SAMPLED_SLOTS]
        for layer in layers
        for buffer in (pool.get_key_buffer, pool.get_value_buffer)
    ]
    counts = torch.stack([_counts(codes) for codes in buffers]).tolist()
    described = [_described(*one) for one in counts]
    return [
        {"module": layer.name, "keys": keys, "values": values}
        for layer, keys, values in zip(layers, described[::2], described[1::2], strict=True)
    ]


def saturated_share(stored: Sequence[dict[str, Any]] | None) -> float | None:
    """Of all sampled codes; None where there are none.

    Args:
        stored: as `stored_codes` gives it.
    """
    sides = [layer[side] for layer in stored or () for side in ("keys", "values")]
    sampled = sum(side["sampled"] for side in sides)
    if not sampled:
        return None
    return sum(side["sampled"] * (side["saturated"] or 0.0) for side in sides) / sampled


def _counts(codes: torch.Tensor) -> torch.Tensor:
    magnitude = codes.view(torch.uint8) & _MAGNITUDE
    return torch.stack(
        [
            (magnitude > 0).sum(),
            (magnitude >= _LARGEST).sum(),
            ((magnitude > 0) & (magnitude < _SMALLEST_NORMAL)).sum(),
            magnitude.amax(),
        ]
    )


def _described(written: int, saturated: int, subnormal: int, largest: int) -> dict[str, Any]:
    if not written:
        return {"sampled": 0, "saturated": None, "subnormal": None, "unused": None}
    value = torch.tensor(largest, dtype=torch.uint8).view(torch.float8_e4m3fn).float().item()
    return {
        "sampled": written,
        "saturated": saturated / written,
        "subnormal": subnormal / written,
        "unused": round(math.log2(FP8_MAX / value), 2) if math.isfinite(value) else None,
    }
