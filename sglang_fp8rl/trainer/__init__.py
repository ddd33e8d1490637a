"""For the trainer's side: torch only, never imports sglang."""

from __future__ import annotations

import importlib
from typing import Any

from .fingerprint import Fingerprinter, added_up, fingerprint_of
from .quantize_for_refit import WireStats, quantize_for_refit
from .shards import LocalShard, assemble, full_tensors

# Names that stood here before they moved to the lab, with the modules that have them now.
_IN_THE_LAB = {
    "sglang_fp8rl.lab.correction": "importance_weights",
    "sglang_fp8rl.lab.metrics": "MismatchInputError MismatchMetrics mismatch_metrics",
}

__all__ = [
    "Fingerprinter",
    "LocalShard",
    "WireStats",
    "added_up",
    "assemble",
    "fingerprint_of",
    "full_tensors",
    "quantize_for_refit",
]


def __getattr__(name: str) -> Any:
    for module, names in _IN_THE_LAB.items():
        if name in names.split():
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
