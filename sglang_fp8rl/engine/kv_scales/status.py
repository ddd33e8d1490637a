"""The section `kv_scales` of the status, and what lies in an FP8 cache, on a sample. Plain types only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...numerics.reference import FP8_MAX
from .attention_layers import AttentionLayer
from .calibration import Calibration
from .choice import Side
from .kv_scales import KvScales
from .sent_scales import SentScales

SAMPLED_SLOTS = 512  # SGLang hands out the lowest free slots
_MAGNITUDE, _LARGEST, _SMALLEST_NORMAL = 0x7F, 0x7E, 0x08


def kv_section(kv: KvScales, sent: SentScales, calibration: Calibration | None) -> dict[str, Any]:
    """Of a server that scales its cache.

    Args:
        sent: scales that the trainer sends, used or not.
        calibration: where the server measures them.
    """
    return {
        "mode": kv.mode,
        "certified": not kv.is_stale
        and all(side.is_certified for one in kv.chosen for side in (one.keys, one.values)),
        "follows_weights": not kv.is_stale,
        "frozen": kv.is_frozen,
        "moves": kv.moves,
        "calibration": calibration.as_dict() if calibration is not None else None,
        "sent": sent.as_dict(kv.layers),
        "layers": [
            {"module": layer.name, "keys": _side(one.keys), "values": _side(one.values)}
            for layer, one in zip(kv.layers, kv.chosen, strict=True)
        ],
    }


def _side(side: Side) -> dict[str, Any]:
    """`head_room`: binades from the largest value (the bound, where none was given) to 448."""
    bound = _known(side.bound)
    largest = _known(side.largest)
    fits = bound if side.largest is None else largest
    room = None if fits is None else side.exponent + math.log2(FP8_MAX / fits)
    return {
        "exponent": side.exponent,
        "bound": bound,
        "largest": largest,
        "head_room": None if room is None else round(room, 3),
        "certified": side.is_certified,
    }


def _known(value: float | None) -> float | None:
    return value if value is not None and 0 < value < math.inf else None


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
