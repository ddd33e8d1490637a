"""Whether a soak left anything behind: the last tenth against the first, as a table and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

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
    table = Table(title="Last tenth against first tenth (medians)")
    for column in ("", "first", "last", "change", "allowed", ""):
        table.add_column(column, justify="left" if not column else "right")
    for line in lines:
        numbers = (line.first, line.last, line.last - line.first, line.allowed)
        mark = "[green]flat[/]" if line.is_flat else "[red]grows[/]"
        table.add_row(line.name, *(f"{number:g}" for number in map(_short, numbers)), mark)
    console.print(table)


def _short(number: float) -> float:
    return round(number, 2)


def plot(samples: Sequence[Sample], warm_up: int, path: Path) -> None:
    """Every quantity over the refits, one panel each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 4, figsize=(14, 6), sharex=True, layout="constrained")
    for panel, (key, (name, _)) in zip(panels.flat, ALLOWED.items(), strict=True):
        panel.plot([getattr(sample, key) for sample in samples], linewidth=1)
        panel.axvline(warm_up, color="grey", linestyle=":", linewidth=1)
        panel.set_title(name, fontsize=10)
        panel.set_ylim(bottom=0)
    figure.supxlabel("refits")
    figure.savefig(path, dpi=120)
    plt.close(figure)
