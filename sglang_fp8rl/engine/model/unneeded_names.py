"""Names that a model skips by design: an update may carry them, and nothing is lost."""

from __future__ import annotations

import re
from typing import Any

# Tables that the engine computes for itself; some trainers keep them as buffers.
_ROTARY_TABLES = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


def left_out(model: Any) -> list[dict[str, str]]:
    """Patterns of names that every rank of this model does without, each with its reason."""
    rows = [{"pattern": _ROTARY_TABLES.pattern, "reason": "a rotary table: the engine computes it"}]
    if getattr(_text_config(model), "tie_word_embeddings", False):
        rows.append({"pattern": r"(^|\.)lm_head\.weight$", "reason": "tied to the embedding"})
    return rows + _draft_layers(_text_config(model))


def _draft_layers(config: Any) -> list[dict[str, str]]:
    """Layers behind the last one are an embedded draft (MTP): the draft model takes them, if any."""
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    first = getattr(config, "num_hidden_layers", 0)
    return [
        {
            "pattern": rf"(^|\.)layers\.{layer}\.",
            "reason": f"layer {layer} is the embedded draft model's (MTP)",
        }
        for layer in range(first, first + count)
    ]


def skipped_by_design(name: str, model: Any) -> str:
    """Why this model does without a tensor of that name, in words; empty if it takes one."""
    for row in left_out(model):
        if re.search(row["pattern"], name):
            return row["reason"]
    return ""


def _text_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    return getattr(config, "text_config", config)
