"""For the trainer's side: torch only, never imports sglang."""

from __future__ import annotations

from sglang_fp8rl.trainer.correction import (
    WeightSummary,
    acceptance_mask,
    effective_sample_size,
    importance_weights,
    masked_importance_weights,
    summarize_weights,
    truncated_importance_weights,
)
from sglang_fp8rl.trainer.metrics import MismatchInputError, MismatchMetrics, mismatch_metrics

__all__ = [
    "MismatchInputError",
    "MismatchMetrics",
    "WeightSummary",
    "acceptance_mask",
    "effective_sample_size",
    "importance_weights",
    "masked_importance_weights",
    "mismatch_metrics",
    "summarize_weights",
    "truncated_importance_weights",
]
