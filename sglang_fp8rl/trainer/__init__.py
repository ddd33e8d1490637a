"""For the trainer's side: torch only, never imports sglang."""

from __future__ import annotations

from .fingerprint import Fingerprinter, added_up, fingerprint_of
from .quantize_for_refit import WireStats, quantize_for_refit
from .shards import LocalShard, assemble, full_tensors

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
