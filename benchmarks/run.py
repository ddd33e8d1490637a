"""`make bench`: every benchmark that needs no GPU, to the end; then says which of them missed a bound.

Each runs in a process of its own and prints its own numbers. Exit status 1 if bytes, memory or counts are
wrong, or one failed; a time above its bound is shown, and decides nothing (`outcome.py`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import typer
from outcome import SLOWER
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
BENCHMARKS = {
    "cast": ("bench_cast_cpu.py", "--json", "cast_cpu.jsonl"),
    "replay": ("bench_replay.py", "--json", "replay_cpu.jsonl"),
    "refit": ("bench_refit.py", "--json", "refit_cpu.jsonl"),
    "request": ("bench_request.py", "--json", "request_cpu.jsonl"),
    "wire": ("bench_wire.py", "--json", "wire.jsonl"),
    "sass": ("bench_sass.py", "--json", "sass.jsonl"),
}
# What of them CI runs: few repetitions, since times decide nothing there.
GUARDS = {
    "cast": ("bench_cast_cpu.py", "--repetitions", "3"),
    "replay": ("bench_replay.py", "--layers", "6", "--repetitions", "2"),
    "refit": ("bench_refit.py", "--repetitions", "2"),
    "request": ("bench_request.py", "--repetitions", "5"),
    "sass": ("bench_sass.py", "--guard"),
}
OUTCOMES = {0: "ok", 1: "missed a bound", SLOWER: "slower than wanted"}


def main(
    guard: bool = typer.Option(False, help="Few repetitions, for CI."),
) -> None:
    """Run them all, whatever one of them finds."""
    console, missed = Console(), []
    table = Table("benchmark", "seconds", "outcome")
    for name, (script, *args) in (GUARDS if guard else BENCHMARKS).items():
        console.rule(name)
        args = [str(RESULTS / one) if one.endswith(".jsonl") else one for one in args]
        began = time.monotonic()
        code = subprocess.run([sys.executable, str(HERE / script), *args]).returncode
        outcome = OUTCOMES.get(code, f"failed with exit status {code}")
        table.add_row(name, f"{time.monotonic() - began:.0f}", outcome)
        missed += [name] if code not in (0, SLOWER) else []
    console.rule()
    console.print(table)
    if missed:
        console.print(f"Not as it should be: {', '.join(missed)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
