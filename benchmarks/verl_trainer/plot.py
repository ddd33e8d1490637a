"""k3 KL and reward of the runs, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl_trainer.check import KL, REWARD
from verl_trainer.trainer_run import RunResult

CURVES = ((KL, "k3 KL, rollout and trainer", "log"), (REWARD, "reward", "linear"))


def plot(runs: Sequence[RunResult], path: Path) -> None:
    """One line per run in each of two panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(CURVES))
    for panel, (key, title, scale) in zip(panels, CURVES, strict=True):
        for run in runs:
            steps = [number for number, step in enumerate(run.metrics, 1) if key in step]
            panel.plot(steps, [run.metrics[n - 1][key] for n in steps], label=run.arm.name)
        panel.set(title=title, xlabel="step", yscale=scale)
        panel.legend()
    figure.savefig(path, dpi=150)
