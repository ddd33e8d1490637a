"""Names that a model skips by design: an update may carry them, and nothing is lost."""

from __future__ import annotations

import re
from typing import Any

# Tables that the engine computes for itself; some trainers keep them as buffers.
_ROTARY_TABLES = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def skipped_by_design(name: str, model: Any) -> str:
    """Why this model takes no tensor of that name, in words; empty if there is no such reason."""
    if _ROTARY_TABLES.search(name):
        return "a rotary table: the engine computes it"
    config = getattr(model, "config", None)
    text_config = getattr(config, "text_config", config)
    if name.endswith("lm_head.weight") and getattr(text_config, "tie_word_embeddings", False):
        return "tied to the embedding"
    inner = getattr(model, "model", None)
    start, end = getattr(inner, "start_layer", None), getattr(inner, "end_layer", None)
    found = _LAYER.search(name)
    total = getattr(text_config, "num_hidden_layers", None)
    if found and isinstance(start, int) and isinstance(end, int) and total:
        layer = int(found.group(2))
        if layer < total and not start <= layer < end:
            return f"layer {layer} lives on another pipeline rank"
    return ""
