"""The band: does FP8 blockwise end where BF16 does, and do its log-probabilities stay close?

Bounds are derived from the committed full run by `derive_bounds` and kept in `bounds.json`, so that
a check compares with measured spread and not with a wish.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from sglang_fp8rl.errors import ConfigError

Record = dict[str, Any]
Runs = Mapping[tuple[str, int], Sequence[Record]]

BASELINE, CHECKED = "bf16", "fp8_blockwise"
FINAL_STEPS = 5  # final accuracy is the mean over this many last steps
ACCURACY_DEVIATIONS = 4.0
KL_FACTOR = 2.0


@dataclass(frozen=True)
class Bounds:
    """What the check holds FP8 to.

    Attributes:
        accuracy_band: largest |difference| of final validation accuracies, FP8 less BF16.
        kl_k3: largest mean of the k3 KL over a run's steps.
        steps, seeds: the length of the runs they hold for.
    """

    accuracy_band: float
    kl_k3: float
    steps: int
    seeds: int


@dataclass(frozen=True)
class Finding:
    """One comparison."""

    what: str
    value: float
    bound: float

    @property
    def ok(self) -> bool:
        # Written so that NaN is not fine.
        return self.value <= self.bound


def final_accuracy(records: Sequence[Record], until: int | None = None) -> float:
    """Mean validation accuracy of the last `FINAL_STEPS` steps (up to step `until`)."""
    taken = [r["val_accuracy"] for r in records if until is None or r["step"] <= until]
    return mean(taken[-FINAL_STEPS:])


def mean_kl(records: Sequence[Record], first: int = 1, last: int | None = None) -> float:
    """Mean k3 KL over the steps from `first` to `last`."""
    end = last if last is not None else records[-1]["step"]
    return mean(r["kl_k3"] for r in records if first <= r["step"] <= end)


def check(runs: Runs, bounds: Bounds) -> list[Finding]:
    """Compare FP8 blockwise with BF16, seed by seed paired; the mean over seeds decides accuracy.

    Raises:
        ConfigError: the runs are not those that the bounds were derived for.
    """
    seeds = sorted(seed for arm, seed in runs if arm == CHECKED)
    lengths = {len(runs.get((arm, seed), ())) - 1 for arm in (BASELINE, CHECKED) for seed in seeds}
    if len(seeds) != bounds.seeds or lengths != {bounds.steps}:
        raise ConfigError(
            "the check",
            f"{len(seeds)} seeds of {sorted(lengths)} steps",
            f"its bounds hold for {bounds.seeds} seeds of {bounds.steps} steps",
            "Run with --short, or derive other bounds.",
        )
    gap = mean(
        final_accuracy(runs[CHECKED, seed]) - final_accuracy(runs[BASELINE, seed]) for seed in seeds
    )
    kl = float(np.max([mean_kl(runs[CHECKED, seed]) for seed in seeds]))  # NaN if one is
    return [
        Finding("|final validation accuracy, FP8 − BF16|", abs(gap), bounds.accuracy_band),
        Finding("k3 KL of FP8 (mean over steps, worst seed)", kl, bounds.kl_k3),
    ]


def derive_bounds(runs: Runs, steps: int, seeds: int) -> Bounds:
    """Bounds for runs of `steps` × `seeds` from longer ones.

    Accuracy: the standard deviation of the paired difference FP8 − BF16, over seeds and over every
    window of `FINAL_STEPS` steps that does not overlap another, is how far two equally good arms
    are apart by chance; the band is `ACCURACY_DEVIATIONS` of it, for a mean over `seeds`.
    KL: `KL_FACTOR` times the largest mean over `steps` consecutive steps of any seed.
    """
    known = sorted(seed for arm, seed in runs if arm == CHECKED and (BASELINE, seed) in runs)
    last = min(len(runs[CHECKED, seed]) for seed in known) - 1
    ends = range(FINAL_STEPS, last + 1, FINAL_STEPS)
    gaps = [
        final_accuracy(runs[CHECKED, seed], end) - final_accuracy(runs[BASELINE, seed], end)
        for seed in known
        for end in ends
    ]
    kl = max(
        mean_kl(runs[CHECKED, seed], first, first + steps - 1)
        for seed in known
        for first in range(1, last - steps + 2)
    )
    return Bounds(
        accuracy_band=round(ACCURACY_DEVIATIONS * stdev(gaps) / seeds**0.5, 4),
        kl_k3=float(f"{KL_FACTOR * kl:.3g}"),
        steps=steps,
        seeds=seeds,
    )


def load_bounds(path: Path) -> Bounds:
    return Bounds(**json.loads(path.read_text()))


def save_bounds(path: Path, bounds: Bounds) -> None:
    path.write_text(json.dumps(asdict(bounds), indent=2) + "\n")
