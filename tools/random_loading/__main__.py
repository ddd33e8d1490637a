"""`python -m tools.random_loading FIRST COUNT`: these seeds, and how their updates ended; the first failure ends it."""

from __future__ import annotations

import sys
from collections import Counter

from tools.random_loading.judge import run

if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    outcomes = sum((run(seed).outcomes for seed in range(first, first + count)), Counter[str]())
    print(f"{count} seeds from {first} on:", dict(outcomes))
