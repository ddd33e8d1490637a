"""`make fuzz ARGS="--steps 10000 --seed 7"`: long random runs of the state machine of refits.

Every run prints its seed, which gives the same run again. Exit status 1: bytes or status were not those of
the model; Hypothesis prints the shortest run of requests that shows it.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from rich.console import Console
from support.engine.pool import EnginePool, engine_key

from tools.fuzz.refit_machine import machine_on

RULES_A_RUN = 40
STEPS_A_RUN = 35  # at least: a rule is one request, or up to six


def main(
    steps: Annotated[int, typer.Option(min=1, help="requests, at least")] = 10_000,
    number: Annotated[int | None, typer.Option("--seed", help="of the runs")] = None,
) -> None:
    console = Console()
    number = secrets.randbelow(1 << 32) if number is None else number
    console.print(f"seed {number}, {steps} steps on one rank, of which the model of the bytes is")
    options = settings(
        max_examples=-(-steps // STEPS_A_RUN),
        stateful_step_count=RULES_A_RUN,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        pool = EnginePool(Path(name))
        with pool.lent(engine_key("qwen3", "tp1")) as engine:
            machine = seed(number)(machine_on(engine, Path(name)))
            run_state_machine_as_test(machine, settings=options)
        pool.close()
    seconds = time.monotonic() - began
    console.print(f"{machine.steps} steps in {seconds:.0f} s: bytes and status were the model's")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    typer.run(main)
