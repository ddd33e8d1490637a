"""The picture: each arm's mean over seeds, with a band from its lowest to its highest seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Record = dict[str, Any]
Runs = Mapping[tuple[str, int], Sequence[Record]]

PANELS = (
    ("val_accuracy", "validation accuracy (greedy, served)", "linear"),
    ("train_accuracy", "accuracy of sampled responses", "linear"),
    ("kl_k3", "k3 KL, rollout against trainer", "log"),
    ("mult_prob_error", "multiplicative probability error − 1", "log"),
    ("ratio_max", "largest ratio trainer / rollout", "linear"),
    ("refit_bytes", "bytes of a refit", "linear"),
)
SMOOTHED = 5  # steps of the moving mean; the band is of the smoothed curves


def draw(
    runs: Runs, path: Path, what: str = "2-layer Qwen3, SGLang on the CPU reference platform"
) -> None:
    """Write the picture of every arm in `runs` to `path`.

    Args:
        what: was run, for the title.
    """
    from matplotlib.figure import Figure

    arms = list(dict.fromkeys(arm for arm, _ in runs))
    figure = Figure(figsize=(15, 8), layout="constrained")
    axes = figure.subplots(2, 3)
    for axis, (key, title, scale) in zip(axes.flat, PANELS, strict=True):
        for number, arm in enumerate(arms):
            curves = [_curve(records, key) for (name, _), records in runs.items() if name == arm]
            length = min(len(steps) for steps, _ in curves)
            steps = curves[0][0][:length]
            values = np.stack([values[:length] for _, values in curves])
            color = f"C{number}"
            style = "--" if arm == "quantized_before_transfer" else "-"
            axis.plot(steps, values.mean(0), style, color=color, label=arm, linewidth=1.5)
            axis.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15)
        axis.set(title=title, xlabel="step", yscale=scale)
        axis.grid(alpha=0.3)
        if key == "refit_bytes":
            axis.set_ylim(bottom=0)
    axes.flat[0].legend(fontsize=8)
    seeds = len({seed for _, seed in runs})
    over = f"mean and range of {seeds} seeds, " if seeds > 1 else ""
    figure.suptitle(f"DAPO, {what}: {over}moving mean over {SMOOTHED} steps")
    figure.savefig(path, dpi=110)


def _curve(records: Sequence[Record], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and smoothed values of one run, as far as the step has that figure."""
    pairs = [(record["step"], record[key]) for record in records if key in record]
    steps, values = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    if key == "mult_prob_error":
        values = values - 1
    if key == "refit_bytes":
        return steps, values
    width = min(SMOOTHED, len(values))
    counts = np.convolve(np.ones_like(values), np.ones(width))[: len(values)]
    return steps, np.convolve(values, np.ones(width))[: len(values)] / counts
