"""The engines of the tests: a rank's failure is told at once, whatever the other ranks wait for."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest
from support.engine import engine_host
from support.engine.engine_host import EngineError, EngineHost


@pytest.fixture
def ranks(monkeypatch):
    """A host and the ends of its two ranks, which this test answers itself."""
    monkeypatch.setattr(engine_host, "_OTHERS_SECONDS", 0.1)
    pipes = [Pipe() for _ in range(2)]
    host = object.__new__(EngineHost)
    host._pipes = [ours for ours, _ in pipes]
    return host, [theirs for _, theirs in pipes]


def test_answers_come_in_the_order_of_ranks_whoever_is_first(ranks):
    host, (zero, one) = ranks
    one.send((False, "one"))
    zero.send((False, "zero"))
    assert host._receive_all() == ["zero", "one"]


def test_the_failure_of_a_rank_is_told_though_the_other_waits_for_it(ranks):
    host, (_, one) = ranks
    one.send((True, "no shared memory"))
    with pytest.raises(EngineError, match="no shared memory"):
        host._receive_all()
    assert host.is_stuck  # asked again, it would give the other rank's late answer


def test_an_answer_beside_a_failure_is_no_answer_to_the_next_call(ranks):
    host, (zero, one) = ranks
    zero.send((True, "refused"))
    one.send((False, "stored"))
    with pytest.raises(EngineError, match="refused"):
        host._receive_all()
    assert not host.is_stuck
    assert not any(pipe.poll(0) for pipe in host._pipes)


def test_a_rank_that_is_gone_is_told(ranks):
    host, (_, one) = ranks
    one.close()
    with pytest.raises(EngineError, match="ended"):
        host._receive_all()
