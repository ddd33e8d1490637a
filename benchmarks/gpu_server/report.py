"""What is shown and what is written: only rows whose gate was passed come here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measured
from rich.console import Console

from .servers import BF16, NATIVE, OURS

# What PERFORMANCE asks for: (milliseconds in the server, times faster than SGLang's own FP8).
TARGETS = {"qwen3-8b": (15.0, 5.0), "qwen3-30b-a3b": (60.0, 13.0)}
END_TO_END_S = {"qwen3-30b-a3b": 0.4}


@dataclass
class Report:
    """Rows so far.

    Attributes:
        json_path: JSON lines are appended here, if given.
        conditions: of the run, part of every line.
    """

    console: Console
    json_path: Path | None
    conditions: Mapping[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, title: str, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
        """Write and show them."""
        found = list(rows)
        self.write(found)
        self.show(title, columns, found)

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append them now, so that whatever ends the run early leaves them behind."""
        found = list(rows)
        self.rows += found
        measured.append(self.json_path, found, **self.conditions)

    def show(self, title: str, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
        """A table of rows that were written."""
        table = measured.table(title, columns, words=2)
        for row in rows:
            table.add_row(*(_cell(column, row.get(column)) for column in columns))
        self.console.print(table)


def against_targets(model: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each target beside what was measured."""
    number = next(row["id"] for row in rows)
    request = {row["what"]: row["median_s"] for row in rows if row["id"] == number}
    ours = next(row for row in rows if row["what"] == OURS.what)
    lines = []
    milliseconds, times = TARGETS.get(model, (None, None))
    if ours["server_median_s"] is not None:
        target = f"target ≤ {milliseconds:.0f} ms" if milliseconds else "no target"
        shown = f"{ours['server_median_s'] * 1e3:.1f} ms"
        lines.append(f"{number}: load_weights, as the server reports it: {shown} ({target})")
    for other, wanted in ((NATIVE, f"≥ {times:g} ×" if times else None), (BF16, "> 1 ×")):
        if other.what in request:
            ratio = request[other.what] / request[OURS.what]
            text = f"target {wanted}" if wanted else "no target"
            lines.append(
                f"{number}: {other.what} over ours, whole requests: {ratio:.2f} × ({text})"
            )
    for row in rows:
        if row["id"] == "G8" and row["what"] == OURS.what:
            limit = END_TO_END_S.get(model)
            target = f"target ≤ {limit} s" if limit else "no target"
            lines.append(f"G8: ours, serialization included: {row['median_s']:.3f} s ({target})")
    return lines


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column.endswith("_s") and "per" not in column:
        return f"{value:.4f}"
    return f"{value:,.0f}" if isinstance(value, float) else str(value)
