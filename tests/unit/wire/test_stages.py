"""Seconds by stage are all that passed, each counted once."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from sglang_fp8rl.engine.arrival.update import Origin
from sglang_fp8rl.engine.law.record import Refit
from sglang_fp8rl.wire.stages import BETWEEN_REQUESTS, seconds_by_stage


def test_a_stage_lasts_until_the_next_begins():
    marks = [("a", 1.0), ("b", 3.0), ("a", 3.5), ("end", 10.0)]
    assert seconds_by_stage(marks) == {"a": 8.5, "b": 0.5}
    assert seconds_by_stage(marks[:1]) == seconds_by_stage([]) == {}


def test_what_passes_between_requests_is_the_refit_s_and_what_came_before_it_is_not():
    refit = Refit(1, Origin.TENSOR, since=1)
    for began in (100.0, 105.0, 107.0):
        refit.add_stages([("answering", began), ("load_weights", began + 0.5), ("", began + 1)])
    assert refit.stages == {"answering": 1.5, "load_weights": 1.5, BETWEEN_REQUESTS: 5.0}
    assert sum(refit.stages.values()) == pytest.approx(108.0 - 100.0)
