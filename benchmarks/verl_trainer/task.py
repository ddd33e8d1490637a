"""The toy task: answer with the letter that was asked for. Checked exactly, and learned in few steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

LETTERS = "abcdefgh"
DATA_SOURCE = "fp8rl/letters"
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 64, 16


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """veRL's custom reward function: the share of the answer that is the letter asked for."""
    if not solution_str:
        return 0.0
    return solution_str.count(ground_truth) / len(solution_str)


def write_problems(path: Path, count: int, *, seed: int = 0) -> Path:
    """A parquet file as veRL's `RLHFDataset` reads it."""
    import pandas

    draw = random.Random(seed)
    rows = []
    for number in range(count):
        letter = draw.choice(LETTERS)
        rows.append(
            {
                "data_source": DATA_SOURCE,
                "prompt": [{"role": "user", "content": f"say {letter}"}],
                "ability": "letters",
                "reward_model": {"style": "rule", "ground_truth": letter},
                "extra_info": {"index": number},
            }
        )
    pandas.DataFrame(rows).to_parquet(path)
    return path
