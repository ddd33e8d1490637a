"""What a set of runs shows, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

import measured
from rich.table import Table

from .check import BASELINE, final_accuracy, mean_kl

Record = dict[str, Any]
Runs = Mapping[tuple[str, int], Sequence[Record]]
COLUMNS = (
    "arm",
    "runs",
    "val start",
    "val end",
    "late, less BF16",
    "k3 KL",
    "error − 1",
    "max ratio",
    "TIS cap",
    "MB",
    "codes",
    "blocks",
    "s/step",
)


def summary(runs: Runs) -> Table:
    """One row an arm: means over seeds; ± is the standard deviation over seeds.

    `late, less BF16` is the mean validation accuracy of the second half of the steps, less that of
    BF16 on the same seed. `codes` and `blocks` are the fractions that a step changed.
    """
    table = measured.table("DAPO, small", COLUMNS)
    for arm in dict.fromkeys(arm for arm, _ in runs):
        own = [records for (name, _), records in runs.items() if name == arm]
        steps = [record for records in own for record in records if record["step"]]
        if not steps:
            continue
        ends = [final_accuracy(records) for records in own]
        spread = f" ± {stdev(ends):.3f}" if len(ends) > 1 else ""
        table.add_row(
            arm,
            f"{len(own)} × {len(steps) // len(own)}",
            f"{mean(records[0]['val_accuracy'] for records in own):.3f}",
            f"{mean(ends):.3f}{spread}",
            _late_difference(runs, arm),
            f"{mean(mean_kl(records) for records in own):.2e}",
            f"{_mean(steps, 'mult_prob_error') - 1:.2e}",
            f"{max(record['ratio_max'] for record in steps):.2f}",
            f"{_mean(steps, 'tis_capped'):.1e}",
            f"{_mean(steps, 'refit_bytes') / 1e6:.2f}",
            f"{_mean(steps, 'codes_changed'):.3f}",
            f"{_mean(steps, 'blocks_changed'):.3f}",
            f"{_mean(steps, 'step_seconds'):.2f}",
        )
    return table


def equal_to_full(runs: Runs, arm: str) -> tuple[int, int]:
    """Refits after which the served model answered as after a full one of the same masters, of all."""
    found = [
        record["equals_full"]
        for (name, _), records in runs.items()
        if name == arm
        for record in records
        if "equals_full" in record
    ]
    return sum(found), len(found)


def equal_rollouts(runs: Runs, one: str, other: str) -> tuple[int, int]:
    """Steps in which two arms sampled the same tokens with the same log-probabilities, of all."""
    equal = total = 0
    for (arm, seed), records in runs.items():
        if arm == one and (other, seed) in runs:
            for a, b in zip(records, runs[other, seed], strict=False):
                if a["step"]:
                    total += 1
                    equal += a["rollout_digest"] == b["rollout_digest"]
    return equal, total


def late_accuracy(records: Sequence[Record]) -> float:
    """Mean validation accuracy over the second half of a run's steps."""
    half = records[-1]["step"] // 2
    return mean(record["val_accuracy"] for record in records if record["step"] > half)


def _late_difference(runs: Runs, arm: str) -> str:
    gaps = [
        late_accuracy(records) - late_accuracy(runs[BASELINE, seed])
        for (name, seed), records in runs.items()
        if name == arm and arm != BASELINE and (BASELINE, seed) in runs
    ]
    if not gaps:
        return ""
    return f"{mean(gaps):+.3f}" + (f" ± {stdev(gaps):.3f}" if len(gaps) > 1 else "")


def _mean(records: Sequence[Record], key: str) -> float:
    found = [record[key] for record in records if key in record]
    return mean(found) if found else float("nan")
