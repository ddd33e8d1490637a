"""DAPO on a CPU with real SGLang rollouts: does FP8 train as BF16 does?

    python benchmarks/accuracy/dapo_small.py                 # every arm, 3 seeds, 60 steps
    python benchmarks/accuracy/dapo_small.py --resume        # what is missing of it
    python benchmarks/accuracy/dapo_small.py --report        # table, picture, bounds; runs nothing
    python benchmarks/accuracy/dapo_small.py --short         # for CI: BF16 against FP8 blockwise
    python benchmarks/accuracy/dapo_small.py --short --fault scale   # the same check, must fail

What is run, and what every number means, is in `README.md` beside this file.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_dapo import records
from small_dapo.check import (
    BASELINE,
    CHECKED,
    check,
    derive_bounds,
    load_bounds,
    save_bounds,
)
from small_dapo.plot import draw
from small_dapo.settings import ARMS, Settings
from small_dapo.summary import equal_rollouts, equal_to_full, summary

from sglang_fp8rl.lab import terminal

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "dapo_small.jsonl"
BOUNDS = HERE / "bounds.json"
SHORT_STEPS, SHORT_SEEDS = 20, 2
console = terminal.console(width=150)


def main(
    steps: Annotated[int, typer.Option(min=1, help="RL steps of each run")] = 60,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each arm")] = 3,
    arms: Annotated[str, typer.Option(help="names, separated by commas")] = ",".join(ARMS),
    out: Annotated[Path | None, typer.Option(help="JSON lines; --short keeps none")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep finished runs of --out")] = False,
    report: Annotated[bool, typer.Option("--report", help="no runs: read --out")] = False,
    short: Annotated[bool, typer.Option("--short", help="the check for CI; exit 1 if red")] = False,
    fault: Annotated[str | None, typer.Option(help="with --short: `scale`, must be red")] = None,
    threads: Annotated[int, typer.Option(min=1, help="of the trainer and of the server")] = 1,
    cache: Annotated[Path | None, typer.Option(help="folder that keeps supervised starts")] = None,
) -> None:
    """Train every arm on the same seeds, write one JSON line a step, say what it shows."""
    names = [BASELINE, CHECKED] if short else arms.split(",")
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise typer.BadParameter(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")
    if fault and not short:
        raise typer.BadParameter("--fault is a test of the check: it goes with --short")
    torch.set_num_threads(threads)
    with terminal.errors_told(), _scratch(cache) as (work, starts):
        if short:
            bounds = load_bounds(BOUNDS)
            path = out or work / "short.jsonl"
            _run_all(names, bounds.seeds, bounds.steps, path, work, starts, threads, fault=fault)
            raise typer.Exit(terminal.FINE if _verdict(path) else terminal.FOUND_WRONG)
        path = out or RESULTS
        if not report:
            _run_all(names, seeds, steps, path, work, starts, threads, resume=resume)
        _report(path)


def _run_all(
    names: list[str],
    seeds: int,
    steps: int,
    path: Path,
    work: Path,
    starts: Path,
    threads: int,
    *,
    resume: bool = False,
    fault: str | None = None,
) -> None:
    """Every arm of a seed, then the next seed. A run that is not whole is run again."""
    # Here, because they import veRL, which takes ten seconds.
    from small_dapo.loop import Run, run_steps
    from small_dapo.start import supervised_start

    settings = Settings()
    wanted = [(name, seed) for seed in range(seeds) for name in names]
    old = records.load(path)
    done = [key for key in old if resume and len(old[key]) == steps + 1]
    records.keep(path, [key for key in old if key in done or (resume and key not in wanted)])
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("steps", total=len(wanted) * steps)
        for name, seed in wanted:
            if (name, seed) in done:
                progress.advance(task, steps)
                continue
            progress.update(task, description=f"seed {seed}: supervised start")
            began = time.monotonic()
            start = supervised_start(settings, seed, starts)
            started = time.monotonic()
            progress.update(task, description=f"seed {seed}: {name}")
            run = Run(
                arm=ARMS[name],
                settings=settings if ARMS[name].tis else replace(settings, tis_cap=None),
                seed=seed,
                steps=steps,
                start=start,
                work=work / f"{name}-{seed}",
                threads=threads,
                fault=fault if name == CHECKED else None,
            )
            for record in run_steps(run):
                records.append(path, {"arm": name, "seed": seed, **record})
                progress.advance(task, 1 if record["step"] else 0)
            console.print(
                f"seed {seed}, {name}: validation {record['val_accuracy']:.3f}; "
                f"start {started - began:.0f} s, {steps} steps {time.monotonic() - started:.0f} s"
            )


def _verdict(path: Path) -> bool:
    """Print the check's comparisons; whether all hold."""
    runs = records.load(path)
    console.print(summary(runs))
    findings = check(runs, load_bounds(BOUNDS))
    for finding in findings:
        word = "[green]ok[/green]" if finding.ok else "[red]RED[/red]"
        console.print(f"{word} {finding.what}: {finding.value:.3g}, bound {finding.bound:.3g}")
    return all(finding.ok for finding in findings)


def _report(path: Path) -> None:
    """Table, token-for-token comparison, picture beside the results, bounds."""
    runs = records.load(path)
    console.print(summary(runs))
    other = "quantized_before_transfer"
    equal, total = equal_to_full(runs, other)
    if total:
        console.print(f"{other}: served as after a full refit in {equal} of {total} steps")
    equal, total = equal_rollouts(runs, CHECKED, other)
    if total:
        console.print(f"{other}: rollouts equal {CHECKED}'s in {equal} of {total} steps")
    draw(runs, path.with_suffix(".png"))
    console.print(f"picture: {path.with_suffix('.png').name}")
    if path == RESULTS:
        bounds = derive_bounds(runs, SHORT_STEPS, SHORT_SEEDS)
        save_bounds(BOUNDS, bounds)
        console.print(f"bounds: {bounds}")


@contextmanager
def _scratch(cache: Path | None) -> Iterator[tuple[Path, Path]]:
    """A working directory, and where supervised starts are kept."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        yield work, cache or work / "starts"


if __name__ == "__main__":
    typer.run(main)
