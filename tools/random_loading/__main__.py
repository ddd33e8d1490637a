"""`python -m tools.random_loading FIRST COUNT`: these seeds, and how their updates ended; the first failure ends it."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from tools.random_loading.judge import run


def main(
    first: Annotated[int, typer.Argument(min=0, help="the first seed")],
    count: Annotated[int, typer.Argument(min=1, help="how many seeds")],
) -> None:
    outcomes = sum((run(seed).outcomes for seed in range(first, first + count)), Counter[str]())
    print(f"{count} seeds from {first} on:", dict(outcomes))


if __name__ == "__main__":
    typer.run(main)
