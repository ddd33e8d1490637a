"""What benchmarks share: runs in turn, memory, quantiles, a table, JSON lines."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table


def seconds_of(run: Callable[[], Any]) -> float:
    """By the wall clock."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    repetitions: int,
    clock: Callable[[Callable[[], Any]], float] = seconds_of,
) -> dict[str, list[float]]:
    """Seconds of each run, taken in turn, behind one of each that is not counted."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            seconds[name].append(clock(run))
    return seconds


def resident_bytes(*, reset_peak: bool = False) -> tuple[int, int]:
    """The resident set of this process and its peak (Linux), which is forgotten first if it is to be."""
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(lines[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


def said(command: Sequence[str]) -> str | None:
    """What a program prints; None where there is no such program, or it fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() if done.returncode == 0 else None


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """The median with p10 and p90."""
    if len(seconds) < 2:
        return dict.fromkeys(("median_s", "p10_s", "p90_s"), seconds[0])
    cuts = statistics.quantiles(seconds, n=10, method="inclusive")
    return {"median_s": statistics.median(seconds), "p10_s": cuts[0], "p90_s": cuts[-1]}


def table(title: str, columns: Iterable[str], *, words: int = 1) -> Table:
    """An empty one: the first `words` columns hold words, all others numbers."""
    made = Table(title=title)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < words else "right")
    return made


def append(path: Path | None, rows: Iterable[Mapping[str, Any]], **conditions: Any) -> None:
    """Append a JSON line for each row, with the conditions behind it; does nothing without a path.

    Results are published: what an error names is told from the folder for scratch files, Python or home on.
    """
    if path is not None:
        lines = (json.dumps({**row, **conditions}) for row in rows)
        with path.open("a") as file:
            file.writelines(without_places(line) + "\n" for line in lines)


def without_places(text: str) -> str:
    """Without what names this machine's folders."""
    for place in sorted((tempfile.gettempdir(), sys.prefix, str(Path.home())), key=len)[::-1]:
        text = text.replace(f"{place.rstrip('/')}/", "") if place != "/" else text
    return text


def commit() -> str | None:
    return said(("git", "rev-parse", "--short", "HEAD"))


def versions(*packages: str) -> dict[str, str]:
    """Of installed packages, by name."""
    return {name: metadata.version(name) for name in packages}
