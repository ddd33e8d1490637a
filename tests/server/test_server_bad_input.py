"""What follows a fault over HTTP, by the outputs; the faults themselves are a table (`test_faults.py`)."""

from __future__ import annotations

import pytest
from support.engine.pool import needs_sessions
from support.server.served import (
    MODEL,
    PROMPTS,
    Client,
    ClientWithoutSessions,
    Served,
    first_weights_afterwards,
    served,
    weights,
)

from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.lab.testing.outputs import differences
from sglang_fp8rl.wire.handles import serialize

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200), pytest.mark.xdist_group("server")]

DOWN = "model.layers.0.mlp.down_proj.weight"
UPDATE = "/update_weights_from_tensor"


@pytest.fixture
def case(server, checkpoint_dir) -> Served:
    """The server, which takes a full update after each test and is whole again."""
    case = served(server, checkpoint_dir)
    with first_weights_afterwards(case):
        yield case


def sent(named_tensors) -> dict:
    """The body of a request; the tensors have to outlive it."""
    return {"serialized_named_tensors": [serialize(named_tensors)]}


def test_one_bad_block_in_a_full_update_is_named_and_the_whole_update_again_mends_it(case):
    tensors = dict(weights("second"))
    tensors[DOWN] = tensors[DOWN].clone()
    tensors[DOWN][130, 500] = float("nan")
    client = ClientWithoutSessions(case.server.url)
    with pytest.raises(RefitError, match=f"{DOWN}: NaN or Inf in 1 of 8"):
        client.update(tensors.items())
    assert len(case.ask()) == len(PROMPTS)  # it answers, though the weights are of two pieces
    assert not case.client.status()["consistent"]
    client.update([(DOWN, MODEL.second[DOWN])], partial=True)
    assert case.client.status()["state"] == "failed"
    client.update(weights("second"))
    case.check("second")


# -- sessions that nobody closes -------------------------------------------------------------------


def abandoned(case: Served) -> None:
    """A client that opened a session, sent a third of the weights, and died."""
    assert case.post("/begin_weight_update")[0] == 200
    tensors = weights("second")[:8]
    assert case.post(UPDATE, {**sent(tensors), "flush_cache": False})[0] == 200
    state = case.client.status()
    assert not state["consistent"]
    assert any("session is open" in problem for problem in state["problems"])
    assert len(case.ask()) == len(PROMPTS)


@needs_sessions
def test_a_session_never_closed_is_reported_and_can_be_ended_by_another_client(case):
    abandoned(case)
    assert case.post("/begin_weight_update")[0] == 400
    assert case.post("/end_weight_update")[0] == 200
    assert not any("session" in problem for problem in case.client.status()["problems"])
    Client(case.server.url).update(weights("second"))
    case.check("second")


@needs_sessions
def test_a_client_without_sessions_may_update_in_one_that_was_never_closed(case):
    abandoned(case)
    ClientWithoutSessions(case.server.url).update(weights("second"))
    assert differences(case.ask(), case.expected["second"]) == []
    assert case.post("/end_weight_update")[0] == 200
    case.check("second")
