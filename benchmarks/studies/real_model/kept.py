"""Measured log-probabilities on disk, so that an interrupted run goes on where it was.

A run is a folder in the cache, named by everything its numbers depend on. A piece is written beside its
place and moved there, so half a piece is never read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import Any

from .models import cache_folder


def digest(values: Any) -> str:
    """Of plain values: equal digests are equal values."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Kept:
    """The pieces of one run.

    Args:
        conditions: what its numbers depend on.
        fresh: forget what is there.
    """

    def __init__(self, conditions: dict[str, Any], *, fresh: bool = False) -> None:
        self.folder = cache_folder() / "runs" / digest(conditions)
        if fresh:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "conditions.json").write_text(json.dumps(conditions, indent=2, default=str))

    def read(self, name: str) -> Any | None:
        """A piece, or None if it was not finished."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def write(self, name: str, value: Any) -> None:
        partial = self.folder / f"{name}.partial"
        partial.write_text(json.dumps(value))
        partial.rename(self.folder / f"{name}.json")
