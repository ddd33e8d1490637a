"""What the status says of exponents, layer by layer, and of the codes that lie in the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...numerics.reference import FP8_MAX
from .attention_layers import AttentionLayer
from .choice import Choice

_SAMPLED_SLOTS = 512  # SGLang hands out the lowest free slots
_SMALLEST_NORMAL = 2.0**-6


def layer_rows(layers: Sequence[AttentionLayer], choice: Choice) -> list[dict[str, Any]]:
    """Of keys and of values: `head_room` is binades from `largest`, or else from the bound, to 448."""
    columns = (choice.exponents, choice.bounds, choice.largest, choice.certified())
    flat = (column.flatten().tolist() for column in columns)
    return _by_layer(layers, [_side(*one) for one in zip(*flat, strict=True)])


def _side(exponent: int, bound: float, largest: float, is_certified: bool) -> dict[str, Any]:
    fits = _known(bound if math.isnan(largest) else largest)
    return {
        "exponent": exponent,
        "bound": _known(bound),
        "largest": _known(largest),
        "head_room": fits and round(exponent + math.log2(FP8_MAX / fits), 3),
        "certified": is_certified,
    }


def _known(value: float) -> float | None:
    return value if 0 < value < math.inf else None


def _by_layer(
    layers: Sequence[AttentionLayer], sides: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    return [
        {"module": layer.name, "keys": keys, "values": values}
        for layer, keys, values in zip(layers, sides[::2], sides[1::2], strict=True)
    ]


def stored_codes(layers: Sequence[AttentionLayer], manager: Any) -> list[dict[str, Any]] | None:
    """Per layer, of keys and of values: `sampled` codes that are not zero, and of these the `saturated`
    share (448 or NaN), the `subnormal` share, and `unused` binades between the largest and 448.

    Reads a few slots of SGLang's pool: small kernels and one transfer, at a request for the status. None
    without a `manager`, and while the cache's memory is released, when nothing of it may be read.
    """
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    if manager is None or GPU_MEMORY_TYPE_KV_CACHE in manager.offload_tags:
        return None
    pool = manager.tp_worker.model_runner.token_to_kv_pool
    counts = [
        _counts(buffer(layer.layer_id)[:_SAMPLED_SLOTS])
        for layer in layers
        for buffer in (pool.get_key_buffer, pool.get_value_buffer)
    ]
    return _by_layer(layers, [_described(*one) for one in torch.stack(counts).tolist()])


def _counts(codes: torch.Tensor) -> torch.Tensor:
    magnitude = codes.view(torch.float8_e4m3fn).double().abs()
    is_subnormal = (magnitude > 0) & (magnitude < _SMALLEST_NORMAL)
    counted = (magnitude != 0, ~(magnitude < FP8_MAX), is_subnormal)
    return torch.stack([*(one.sum().double() for one in counted), magnitude.amax()])


def _described(
    written: float, saturated: float, subnormal: float, largest: float
) -> dict[str, Any]:
    if not written:
        return {"sampled": 0, "saturated": None, "subnormal": None, "unused": None}
    return {
        "sampled": int(written),
        "saturated": saturated / written,
        "subnormal": subnormal / written,
        "unused": None if math.isnan(largest) else round(math.log2(FP8_MAX / largest), 2),
    }


def saturated_share(stored: Sequence[dict[str, Any]] | None) -> float | None:
    """Of all sampled codes in `stored_codes`; None where there are none."""
    sides = [layer[side] for layer in stored or () for side in ("keys", "values")]
    sampled = sum(side["sampled"] for side in sides)
    saturated = sum(side["sampled"] * (side["saturated"] or 0.0) for side in sides)
    return saturated / sampled if sampled else None
