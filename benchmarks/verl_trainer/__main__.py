"""`make verl`: veRL's own trainer: FP8, with a plain actor and one that trains what is served, BF16, and FP8 with a wrong scale.

Exits with 1 if what a run shows is not what it has to show: it did not end well, a refit was not whole
by the server's own status, k3 KL is out of its bounds, or the wrong scale is not seen. With 2 if a run
did not come as far as its first refit, which says nothing about either.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import measured
import typer
from rich.console import Console
from rich.table import Table

from verl_trainer.check import KL, REWARD, mean_kl, problems
from verl_trainer.failure import why_it_never_began
from verl_trainer.model import make_model
from verl_trainer.task import write_problems
from verl_trainer.trainer_run import Arm, RunResult, run_trainer

ARMS = (
    Arm("fp8"),
    Arm("served", served=True),
    Arm("bf16", quantization=None),
    Arm("wrong-scale", wrong_scale=4.0),
    Arm("served-wrong-scale", wrong_scale=4.0, served=True),
)
STEPS, SHORT_STEPS = 8, 3
RUN_TIMEOUT_S = 900.0


def main(
    steps: Annotated[int, typer.Option(help="training steps of each run")] = STEPS,
    tp_size: Annotated[int, typer.Option(help="ranks of the server, and of the trainer")] = 1,
    short: Annotated[bool, typer.Option("--short", help="FP8 only, 3 steps: for CI")] = False,
    arm: Annotated[list[str] | None, typer.Option(help="only these")] = None,
    out: Annotated[
        Path | None, typer.Option(help="keep logs here (else a temporary folder)")
    ] = None,
    timeout: Annotated[float, typer.Option(help="seconds of each run")] = RUN_TIMEOUT_S,
    json_path: Annotated[Path | None, typer.Option("--json", help="append a line per run")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="write the curves here")] = None,
) -> None:
    """Train a small Qwen3 on a toy task with veRL, served by this package and by plain SGLang."""
    console = Console(width=None if Console().is_terminal else 110)
    steps = SHORT_STEPS if short else steps
    names = ["fp8"] if short else arm or [one.name for one in ARMS]
    out = (out or Path(tempfile.mkdtemp(prefix="fp8rl-verl-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    model, data = make_model(out / "model"), write_problems(out / "problems.parquet", 8 * 64)
    runs, found = [], []
    for one in (one for one in ARMS if one.name in names):
        console.print(f"{one.name}: {steps} steps, log {out / one.name / 'trainer.log'}")
        run = run_trainer(
            model,
            data,
            one,
            steps=steps,
            tp_size=tp_size,
            out=out / one.name,
            timeout=timeout,
        )
        if not run.refits:
            console.print(why_it_never_began(run), style="red", markup=False, highlight=False)
            raise typer.Exit(2)
        runs.append(run)
        found += [f"{one.name}: {text}" for text in problems(run, steps)]
        measured.append(json_path, [summary(run, tp_size)])
    console.print(table(runs, tp_size))
    if plot_path:
        from verl_trainer.plot import plot

        plot(runs, plot_path)
        console.print(f"curves: {plot_path}")
    for text in found:
        console.print(text, style="red", markup=False, highlight=False)
    raise typer.Exit(int(bool(found)))


def table(runs: list[RunResult], tp_size: int) -> Table:
    shown = measured.table(
        f"veRL {version('verl')}, SGLang {version('sglang')}, TP {tp_size}: "
        "`python -m verl.trainer.main_ppo` on a CPU",
        ("run", "steps", "refits", "whole", "k3 KL", "reward", "refit s", "run s"),
    )
    for run in runs:
        row = summary(run, tp_size)
        whole = "-" if row["whole_refits"] is None else str(row["whole_refits"])
        kl = "-" if row["k3_kl"] is None else f"{row['k3_kl']:.2e}"
        reward = " → ".join(f"{value:.2f}" for value in row["reward"])
        numbers = (f"{row['refit_seconds']:.2f}", f"{row['seconds']:.0f}")
        shown.add_row(
            row["arm"], str(row["steps"]), str(row["refits"]), whole, kl, reward, *numbers
        )
    return shown


def summary(run: RunResult, tp_size: int) -> dict[str, Any]:
    """One run in JSON; `whole_refits` are those that the server calls ok, complete, consistent."""
    rewards = [step[REWARD] for step in run.metrics if REWARD in step]
    statuses = [refit["status"] for refit in run.refits if refit["status"]]
    whole = [
        status["consistent"]
        and status["last_refit"]["outcome"] == "ok"
        and status["last_refit"]["complete"]
        for status in statuses
    ]
    return {
        "benchmark": "verl_trainer",
        "arm": run.arm.name,
        **measured.versions("sglang", "verl"),
        "tp_size": tp_size,
        "steps": len(run.metrics),
        "refits": len(run.refits),
        "whole_refits": sum(whole) if statuses else None,
        "k3_kl": mean_kl(run) if any(KL in step for step in run.metrics) else None,
        "reward": [round(value, 3) for value in (rewards[:1] + rewards[-1:])],
        "refit_seconds": round(mean(refit["seconds"] for refit in run.refits), 3),
        "seconds": round(run.seconds),
    }


if __name__ == "__main__":
    typer.run(main)
