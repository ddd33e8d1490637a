"""For the trainer's side: torch only, never imports sglang."""

from __future__ import annotations

from .correction import (
    WeightSummary,
    acceptance_mask,
    effective_sample_size,
    importance_weights,
    masked_importance_weights,
    summarize_weights,
    truncated_importance_weights,
)
from .fingerprint import Fingerprinter, added_up, fingerprint_of
from .metrics import MismatchInputError, MismatchMetrics, mismatch_metrics
from .quantize_for_refit import WireStats, quantize_for_refit
from .shards import LocalShard, assemble, full_tensors

__all__ = [
    "Fingerprinter",
    "LocalShard",
    "MismatchInputError",
    "MismatchMetrics",
    "WeightSummary",
    "WireStats",
    "acceptance_mask",
    "added_up",
    "assemble",
    "effective_sample_size",
    "fingerprint_of",
    "full_tensors",
    "importance_weights",
    "masked_importance_weights",
    "mismatch_metrics",
    "quantize_for_refit",
    "summarize_weights",
    "truncated_importance_weights",
]
