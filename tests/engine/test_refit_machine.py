"""A state machine of refits against a real engine; `make fuzz` runs longer ones."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.engine.pool import on
from support.engine.refit_machine import machine_on

pytestmark = [pytest.mark.engine, on("qwen3-tp1")]

RULES_A_RUN = 40
STEPS_A_RUN = 30  # at least, on average: a rule is one request, or up to six


def run(engine, directory, steps: int) -> int:
    """At least so many steps; how many there were."""
    machine = machine_on(engine, directory)
    options = settings(
        max_examples=-(-steps // STEPS_A_RUN),
        stateful_step_count=RULES_A_RUN,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=options)
    return machine.steps


@pytest.mark.parametrize(
    "steps", [400, pytest.param(2000, marks=pytest.mark.slow)], ids="{}-steps".format
)
def test_after_any_run_of_requests_bytes_and_status_are_those_of_a_simple_model(
    host, tmp_path, steps
):
    assert run(host, tmp_path, steps) >= steps
