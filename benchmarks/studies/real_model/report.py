"""The measured arms as a table, and as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measured
from rich.console import Console

from .arms import DEFAULT

Line = dict[str, Any]
_DIGITS = 5
_COLUMNS = (
    *("arm", "k3 KL", "mult. error", "error - 1, / default's", "99 %", "worst", "> C=2"),
    *("k3, own samples", "perplexity / BF16's"),
)


def print_report(lines: Sequence[Line], console: Console) -> None:
    """Show every arm, and how its gap grows with the position in the answer."""
    conditions, arms = lines[0], lines[1:]
    gap = arms[0]["gap"]
    table = measured.table(
        f"{conditions['model']}: {gap['tokens']} tokens of {gap['answers']} answers, rollout against "
        "the trainer in BF16 [95 %]",
        _COLUMNS,
    )
    for line in arms:
        table.add_row(*_row(line))
    console.print(table)
    console.print(
        "99 %, worst: |log-ratio| of a token. > C=2: share of tokens that TIS with C=2 cuts. "
        "Own samples: answers that the arm sampled itself, token by token.",
        style="dim",
    )
    _print_positions(arms, console)


def write_lines(lines: Sequence[Line], path: Path) -> None:
    """Write the lines; those of other models that the file has stay."""
    model = lines[0]["model"]
    kept = []
    if path.exists():
        kept = [
            line for line in path.read_text().splitlines() if json.loads(line)["model"] != model
        ]
    ours = [json.dumps(_rounded({"model": model, **line})) for line in lines]
    path.write_text("\n".join([*kept, *ours]) + "\n")


def read_lines(path: Path, model: str) -> list[Line]:
    """The lines of one model."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in found if line["model"] == model]


def interval(estimate: dict[str, float], form: str = ".3g") -> str:
    """`value [low, high]`."""
    low, high = estimate["low"], estimate["high"]
    return f"{estimate['value']:{form}} [{low:{form}}, {high:{form}}]"


def _row(line: Line) -> list[str]:
    gap = line["gap"]
    paired = line.get(f"to_{DEFAULT}")
    own = line.get("own_samples")
    return [
        line["arm"],
        interval(gap["kl_k3"]),
        interval(gap["mult_prob_error"], ".3f"),
        interval(paired["mult_prob_error_less_one"], ".2f")
        if paired and line["arm"] != DEFAULT
        else "",
        f"{gap['quantiles']['0.99']:.2f}",
        f"{gap['worst']['abs_log_ratio']:.2f}",
        f"{gap['above_tis_cap']:.2%}",
        interval(own["kl_k3"]) if own else "",
        interval(line["perplexity_to_bf16"], ".4f"),
    ]


def _print_positions(arms: Sequence[Line], console: Console) -> None:
    starts = [one["from"] for one in arms[0]["gap"]["by_position"]]
    columns = ("arm", *(f"from {start}" for start in starts))
    table = measured.table("k3 KL by position in the answer", columns)
    for line in arms:
        values = {one["from"]: one["kl_k3"] for one in line["gap"]["by_position"]}
        table.add_row(line["arm"], *(f"{values[start]:.2e}" for start in starts))
    console.print(table)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return value
