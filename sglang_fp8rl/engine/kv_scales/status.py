"""The section `kv_scales` of the status. Plain types only."""

from __future__ import annotations

import math
from typing import Any

from ...numerics.reference import FP8_MAX
from .choice import Side
from .kv_scales import KvScales


def kv_section(kv: KvScales) -> dict[str, Any] | None:
    """None where the cache has no scales of ours."""
    if not kv.is_active:
        return None
    return {
        "mode": kv.mode,
        "certified": not kv.is_stale
        and all(side.is_certified for one in kv.chosen for side in (one.keys, one.values)),
        "follows_weights": not kv.is_stale,
        "frozen": kv.is_frozen,
        "moves": kv.moves,
        "layers": [
            {"module": layer.name, "keys": _side(one.keys), "values": _side(one.values)}
            for layer, one in zip(kv.layers, kv.chosen, strict=True)
        ],
    }


def _side(side: Side) -> dict[str, Any]:
    """`head_room`: binades between the bound and e4m3's largest number, below 1 unless limited."""
    is_known = 0 < side.bound < math.inf
    room = side.exponent + math.log2(FP8_MAX / side.bound) if is_known else None
    return {
        "exponent": side.exponent,
        "bound": side.bound if is_known else None,
        "head_room": None if room is None else round(room, 3),
        "certified": side.is_certified,
    }
