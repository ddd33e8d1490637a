"""Fixtures that tests of the package and of the studies share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """So small a model is slower on several, and the last digit of its sums depends on how many."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def plans_in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made in forks of the fork server instead of new interpreters."""
    from sglang_fp8rl.lab import plan_offline
    from support.engine.forked import run_plan

    monkeypatch.setattr(plan_offline, "run_in_new_interpreter", run_plan)
