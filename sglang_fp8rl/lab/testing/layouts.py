"""Layouts of flattened buckets that a test, a fuzzer or a benchmark has changed, as the text that is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...wire.layout_text import Columns


def to_text(metadata: Sequence[Any]) -> str:
    """Describe tensors that have the attributes of SGLang's own metadata, in one string."""
    attributes = "name", "shape", "dtype", "start_idx", "end_idx"
    return Columns(*([getattr(one, name) for one in metadata] for name in attributes)).to_text()
