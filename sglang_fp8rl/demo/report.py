"""What the demo found, as JSON types and as tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class RefitFigures:
    """One full update. HTTP time is what the client waited for answers; engine time, part of it, is
    what the server spent in `load_weights`: reading, casting and storing."""

    name: str
    tensors: int
    nbytes: int
    buckets: int
    load_format: str
    http_seconds: float
    engine_seconds: float
    sqnr_db: dict[str, float | None]

    @property
    def engine_gb_per_s(self) -> float:
        return self.nbytes / self.engine_seconds / 1e9 if self.engine_seconds else 0.0

    @property
    def http_gb_per_s(self) -> float:
        return self.nbytes / self.http_seconds / 1e9 if self.http_seconds else 0.0


@dataclass
class DemoReport:
    """Everything the demo reports; `as_dict` is what `--json` prints."""

    model: str
    device: str
    sglang: str
    torch: str
    sessions: bool = False
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
        refits = [
            asdict(refit)
            | {
                "engine_gb_per_s": round(refit.engine_gb_per_s, 3),
                "http_gb_per_s": round(refit.http_gb_per_s, 3),
            }
            for refit in self.refits
        ]
        return asdict(self) | {"refits": refits, "ok": self.ok}


def print_report(report: DemoReport, console: Console) -> None:
    """The short report at the end."""
    refits = Table(
        "refit", "tensors", "GB", "buckets", "HTTP s", "engine s", "engine GB/s", title="refits",
        title_justify="left",
    )  # fmt: skip
    for refit in report.refits:
        refits.add_row(
            refit.name,
            str(refit.tensors),
            f"{refit.nbytes / 1e9:.3f}",
            f"{refit.buckets} × {refit.load_format}",
            f"{refit.http_seconds:.2f}",
            f"{refit.engine_seconds:.2f}",
            f"{refit.engine_gb_per_s:.2f}",
        )
    console.print(refits)
    facts = Table(show_header=False, box=None)
    for scheme, decibels in report.refits[-1].sqnr_db.items():
        text = f"{decibels:.1f} dB (sampled)" if decibels is not None else "not measured here"
        facts.add_row(f"SQNR {scheme}", text)
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
    console.print(
        f"[green]All {report.outputs_compared} outputs (tokens and log-probabilities) are bitwise "
        "equal to a fresh server's.[/green]",
        highlight=False,
    )
    console.print(
        "Next: `sglang-fp8rl demo --model PATH` on your own checkpoint; `sglang-fp8rl plan MODEL "
        "--tp 2`\nto see what a parallel layout does; README, “veRL”, to train with it.",
        markup=False,
        highlight=False,
    )
