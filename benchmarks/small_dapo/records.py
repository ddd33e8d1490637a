"""Results as JSON lines: one line for an arm, a seed and a step, and what they were made with."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Key = tuple[str, int]  # arm, seed
_DIGITS = 5


def append(path: Path, record: Record) -> None:
    """Write one record; numbers keep five significant digits."""
    rounded = {key: _rounded(value) for key, value in record.items()}
    with path.open("a") as file:
        file.write(json.dumps(rounded, separators=(",", ":")) + "\n")


def load(path: Path) -> dict[Key, list[Record]]:
    """Records by arm and seed, in the order of their steps; an absent file holds none."""
    runs: dict[Key, list[Record]] = defaultdict(list)
    if path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            runs[record["arm"], record["seed"]].append(record)
    for records in runs.values():
        records.sort(key=lambda record: record["step"])
    return dict(runs)


def keep(path: Path, keys: Iterable[Key]) -> None:
    """Drop every record whose run is not among `keys`: unfinished runs begin anew."""
    wanted = set(keys)
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    records = [(json.loads(line), line) for line in lines]
    kept = [line for record, line in records if (record["arm"], record["seed"]) in wanted]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept))
    partial.rename(path)


def _rounded(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
