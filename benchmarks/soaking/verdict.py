"""Whether a soak left anything behind: the last tenth against the first, as a table and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import measured
from rich.console import Console

from .resources import ALLOWED, Sample


@dataclass(frozen=True)
class Line:
    """One quantity.

    Attributes:
        first, last: medians of the first and the last tenth.
        allowed: what the last may have more.
    """

    name: str
    first: float
    last: float
    allowed: float

    @property
    def is_flat(self) -> bool:
        return self.last - self.first <= self.allowed


def compare(samples: Sequence[Sample]) -> list[Line]:
    """Medians of a tenth of the samples each, after the warm-up."""
    tenth = max(1, len(samples) // 10)
    lines = []
    for key, (name, allowed) in ALLOWED.items():
        first, last = (
            statistics.median(getattr(sample, key) for sample in part)
            for part in (samples[:tenth], samples[-tenth:])
        )
        lines.append(Line(name, first, last, allowed))
    return lines


def show(console: Console, lines: Sequence[Line]) -> None:
    columns = ("", "first", "last", "change", "allowed", "")
    table = measured.table("Last tenth against first tenth (medians)", columns)
    for line in lines:
        numbers = (line.first, line.last, line.last - line.first, line.allowed)
        mark = "[green]flat[/]" if line.is_flat else "[red]grows[/]"
        table.add_row(line.name, *(f"{round(number, 2):g}" for number in numbers), mark)
    console.print(table)


def plot(samples: Sequence[Sample], warm_up: int, path: Path) -> None:
    """Every quantity over the refits, one panel each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6), layout="constrained")
    panels = figure.subplots(2, 4, sharex=True)
    for panel, (key, (name, _)) in zip(panels.flat, ALLOWED.items(), strict=True):
        values = [getattr(sample, key) for sample in samples]
        panel.plot(values, linewidth=1)
        panel.axvline(warm_up, color="grey", linestyle=":", linewidth=1)
        panel.set(title=name, ylim=(0, 1.1 * max(values, default=0) or None))
    figure.supxlabel("refits")
    figure.savefig(path, dpi=120)
