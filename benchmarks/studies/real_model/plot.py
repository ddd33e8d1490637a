"""The measured arms as a picture: mean gap, tail, position in the answer, perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .arms import BASELINE, DEFAULT

Line = dict[str, Any]


def draw(lines: Sequence[Line], path: Path) -> None:
    """Write the picture. No global state of matplotlib is touched."""
    from matplotlib.figure import Figure

    conditions, arms = lines[0], list(lines[1:])
    names = [line["arm"] for line in arms]
    colors = [_color(name, number) for number, name in enumerate(names)]
    figure = Figure(figsize=(15, 9), layout="constrained")
    mean, tail, position, text = figure.subplots(2, 2).flat

    _bars(mean, names, [line["gap"]["kl_k3"] for line in arms], colors)
    mean.set(title="k3 KL, rollout against trainer (BF16)", xscale="log")

    quantiles = ("0.5", "0.9", "0.99", "0.999")
    for line, color in zip(arms, colors, strict=True):
        values = [line["gap"]["quantiles"][q] for q in quantiles]
        values.append(line["gap"]["worst"]["abs_log_ratio"])
        tail.plot(range(len(values)), values, "o-", color=color, label=line["arm"], markersize=4)
    tail.set_xticks(range(5), ["50 %", "90 %", "99 %", "99.9 %", "worst"])
    tail.set(title="|log-ratio| of a token", yscale="log")
    tail.legend(fontsize=7, ncols=2)

    for line, color in zip(arms, colors, strict=True):
        bins = line["gap"]["by_position"]
        middle = [one["from"] + 1 for one in bins]
        position.plot(middle, [one["kl_k3"] for one in bins], "o-", color=color, markersize=4)
    position.set(
        title="k3 KL by position in the answer (a bin's first token)", xscale="log", yscale="log"
    )

    ratios = [line["perplexity_to_bf16"] for line in arms if line["arm"] != BASELINE]
    rest = [(n, c) for n, c in zip(names, colors, strict=True) if n != BASELINE]
    _bars(text, [n for n, _ in rest], ratios, [c for _, c in rest])
    text.axvline(1.0, color="black", linewidth=0.8)
    text.set(title="perplexity of given text over the BF16 server's")

    for axis in (mean, tail, position, text):
        axis.grid(alpha=0.3)
    figure.suptitle(
        f"{conditions['model']} on SGLang {conditions['sglang']}, CPU reference platform: "
        f"{arms[0]['gap']['tokens']} tokens of {arms[0]['gap']['answers']} answers; 95 % intervals"
    )
    figure.savefig(path, dpi=100)


def _bars(axis: Any, names: list[str], estimates: list[dict[str, float]], colors: list) -> None:
    """One point with its interval for each name, the first on top."""
    for number, (estimate, color) in enumerate(zip(estimates, colors, strict=True)):
        value = estimate["value"]
        reach = [[value - estimate["low"]], [estimate["high"] - value]]
        axis.errorbar(value, number, xerr=reach, fmt="o", color=color, capsize=3)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()


def _color(name: str, number: int) -> str:
    others = ("C0", "C1", "C2", "C4", "C5", "C6", "C7", "C8", "C9")  # C3 is the default's red
    return {BASELINE: "black", DEFAULT: "C3"}.get(name, others[number % len(others)])
