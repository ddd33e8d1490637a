"""What the demo shows: its steps while they run, then what was found, as tables and for JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table


class Screen:
    """Numbered steps on a console. Where it is no terminal, lines are printed and nothing moves."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._step = 0

    def note(self, text: str) -> None:
        self.console.print(f"   {text}", markup=False, highlight=False)

    @contextlib.contextmanager
    def step(self, text: str, *, nbytes: int | None = None) -> Iterator[Callable[[int], None]]:
        """A step and the time it has taken: with a bar where it is known how many bytes it moves, else with a
        spinner. The callback takes those moved so far."""
        self._step += 1
        self.console.print(f"[bold]{self._step:>2}[/bold] {text}", highlight=False)
        began, moves = monotonic(), self.console.is_terminal
        measure = (TextColumn("  "), BarColumn(), TransferSpeedColumn())
        columns = (SpinnerColumn(), TextColumn("working")) if nbytes is None else measure
        with Progress(
            *columns, TimeElapsedColumn(), console=self.console, transient=True, disable=not moves
        ) as shown:
            task = shown.add_task("", total=nbytes)
            yield lambda moved: shown.update(task, completed=moved)
        self.console.print(f"   done in {monotonic() - began:.1f} s", style="dim", highlight=False)


@dataclass(frozen=True)
class RefitFigures:
    """One full update. HTTP time is what the client waited for answers; engine time, part of it, is
    what the server spent in `load_weights`: reading, casting and storing."""

    name: str
    tensors: int
    nbytes: int
    buckets: int
    http_seconds: float
    engine_seconds: float

    def gb_per_s(self, seconds: float) -> float:
        return self.nbytes / seconds / 1e9 if seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "engine_gb_per_s": round(self.gb_per_s(self.engine_seconds), 3),
            "http_gb_per_s": round(self.gb_per_s(self.http_seconds), 3),
        }


@dataclass
class DemoReport:
    model: str
    device: str
    sglang: str
    torch: str
    plan: list[dict[str, str]] = field(default_factory=list)
    schemes: dict[str, int] = field(default_factory=dict)
    fp8_bytes: int = 0
    bf16_bytes_replaced: int = 0
    refits: list[RefitFigures] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    checks: dict[str, list[str]] = field(default_factory=dict)
    outputs_compared: int = 0
    directory: str = ""

    @property
    def ok(self) -> bool:
        return not self.problems and not any(self.checks.values())

    def as_dict(self) -> dict[str, Any]:
        refits = [refit.as_dict() for refit in self.refits]
        return asdict(self) | {"refits": refits, "ok": self.ok}


def print_report(report: DemoReport, console: Console) -> None:
    refits = Table(
        "refit", "tensors", "GB", "buckets", "HTTP s", "engine s", "engine GB/s", title="refits",
        title_justify="left",
    )  # fmt: skip
    for refit in report.refits:
        refits.add_row(
            refit.name,
            str(refit.tensors),
            f"{refit.nbytes / 1e9:.3f}",
            str(refit.buckets),
            f"{refit.http_seconds:.2f}",
            f"{refit.engine_seconds:.2f}",
            f"{refit.gb_per_s(refit.engine_seconds):.2f}",
        )
    console.print(refits)
    facts = Table(show_header=False, box=None)
    saved = report.fp8_bytes / report.bf16_bytes_replaced if report.bf16_bytes_replaced else 1
    facts.add_row(
        "served in FP8",
        f"{report.fp8_bytes / 1e6:.1f} MB in place of {report.bf16_bytes_replaced / 1e6:.1f} MB "
        f"BF16 ({saved:.0%})",
    )
    facts.add_row("host", f"SGLang {report.sglang}, torch {report.torch}, {report.device}")
    console.print(facts)
    for check, found in report.checks.items():
        mark = "[green]equal[/green]" if not found else "[red]DIFFERENT[/red]"
        console.print(f"{mark}  {check}", highlight=False)
        for line in found:
            console.print(f"       {line}", style="red", markup=False)
    for problem in report.problems:
        console.print(problem, style="red", markup=False)
    if not report.ok:
        console.print(f"[red]The demo failed.[/red] Logs: {report.directory}", highlight=False)
        return
    outputs = f"All {report.outputs_compared} outputs (tokens and log-probabilities)"
    console.print(
        f"[green]{outputs} are bitwise equal to a fresh server's.[/green]", highlight=False
    )
    console.print(
        "Next: `sglang-fp8rl demo --model PATH` on your own checkpoint; `sglang-fp8rl plan MODEL "
        "--tp 2`\nto see what a parallel layout does; README, “veRL”, to train with it.",
        markup=False,
        highlight=False,
    )
