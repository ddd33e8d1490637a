"""FP8 rollout for RL on SGLang. Importing this imports neither torch nor sglang."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .client import RefitClient as RefitClient
    from .client import fetch_plan as fetch_plan
    from .numerics import dequantize as dequantize
    from .numerics import quantize_blockwise as quantize_blockwise
    from .numerics import quantize_per_channel as quantize_per_channel
    from .wire.plan import RefitPlan as RefitPlan

_HOMES = {
    "RefitClient": ".client",
    "RefitPlan": ".wire.plan",
    "dequantize": ".numerics",
    "fetch_plan": ".client",
    "quantize_blockwise": ".numerics",
    "quantize_per_channel": ".numerics",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
