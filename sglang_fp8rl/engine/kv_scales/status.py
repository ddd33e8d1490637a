"""The section `kv_scales` of the status. Plain types only."""

from __future__ import annotations

import math
from typing import Any

from ...numerics.reference import FP8_MAX
from .calibration import Calibration
from .choice import Side
from .kv_scales import KvScales
from .sent_scales import SentScales


def kv_section(
    kv: KvScales, sent: SentScales, calibration: Calibration | None
) -> dict[str, Any] | None:
    """None where the cache has no scales of ours.

    Args:
        sent: scales that the trainer sends, used or not.
        calibration: where the server measures them.
    """
    if not kv.is_active:
        return None
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
