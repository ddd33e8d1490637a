"""The toy task: answer in the kind of letters that was asked for. Checked exactly, learned in few steps."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

# A random model gets a tenth of it right, by chance: enough for a gradient from the first step on.
KINDS = {"lower": string.ascii_lowercase, "upper": string.ascii_uppercase}
DATA_SOURCE = "fp8rl/letters"
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 64, 16


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """veRL's custom reward function: the share of the answer that is of the kind asked for."""
    if not solution_str:
        return 0.0
    return sum(one in KINDS[ground_truth] for one in solution_str) / len(solution_str)


def write_problems(path: Path, count: int, *, seed: int = 0) -> Path:
    """A parquet file as veRL's `RLHFDataset` reads it."""
    import pandas

    draw = random.Random(seed)
    rows = []
    for number in range(count):
        kind = draw.choice(sorted(KINDS))
        rows.append(
            {
                "data_source": DATA_SOURCE,
                "prompt": [{"role": "user", "content": f"say {kind}"}],
                "ability": "letters",
                "reward_model": {"style": "rule", "ground_truth": kind},
                "extra_info": {"index": number},
            }
        )
    pandas.DataFrame(rows).to_parquet(path)
    return path
