"""Results as JSON lines: one line for an arm, a seed and a step, and what they were made with.

Step 0 is the start, with the run's conditions. Figures of rollouts are over everything that was sampled in the step.

- `val_accuracy`: of 128 held-out problems, the fraction that the served model answers right, greedily, after the refit.
- `train_accuracy`, `reward`: of sampled responses, the fraction right; the mean of ±1 and overlong punishment.
- `response_tokens`, `entropy`: mean length; mean of −log-probability per sampled token, by the trainer.
- `groups_drawn`, `groups_used`: problems sampled, trained on.
- `kl_k3`, `kl_k1`: of KL(rollout ‖ trainer) per token, the mean of `ratio − 1 − log ratio`, and of `−log ratio`. `ratio` is
  the trainer's probability over the rollout engine's, before the step's update.
- `ratio_max`, `mult_prob_error`, `prob_pearson`: the largest ratio; mean of exp(abs(log ratio)); correlation of the two
  probabilities.
- `tis_capped`: fraction of trained tokens whose weight was cut at C.
- `loss`, `grad_norm`, `clip_fraction`: means over the step's two updates; the norm before it is clipped to 1.
- `refit_bytes`, `refit_seconds`: on the wire; until served, quantization by the trainer included.
- `codes_changed`, `blocks_changed`: fraction of FP8 codes, and of 128×128 blocks, that changed since the step before;
  `blocks_sent`: that were sent, all of them.
- `rollout_digest`: equal digests are equal tokens and log-probabilities, bit for bit.
- `equals_full`: the 128 answers are bitwise those after a full FP32 refit of the same masters.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Key = tuple[str, int]  # arm, seed
_DIGITS = 5


def append(path: Path, record: Record) -> None:
    """Write one record; numbers keep five significant digits."""
    rounded = {key: _rounded(value) for key, value in record.items()}
    with path.open("a") as file:
        file.write(json.dumps(rounded, separators=(",", ":")) + "\n")


def load(path: Path) -> dict[Key, list[Record]]:
    """Records by arm and seed, in the order of their steps; an absent file holds none."""
    runs: dict[Key, list[Record]] = defaultdict(list)
    if path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            runs[record["arm"], record["seed"]].append(record)
    for records in runs.values():
        records.sort(key=lambda record: record["step"])
    return dict(runs)


def keep(path: Path, keys: Iterable[Key]) -> None:
    """Drop every record whose run is not among `keys`: unfinished runs begin anew."""
    wanted = set(keys)
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    records = [(json.loads(line), line) for line in lines]
    kept = [line for record, line in records if (record["arm"], record["seed"]) in wanted]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept))
    partial.rename(path)


def _rounded(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
