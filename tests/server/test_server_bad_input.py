"""Bad input over HTTP: a refusal that names the tensor, and a server that goes on answering."""

from __future__ import annotations

import base64
import pickle

import pytest
import torch
from _served import (
    HAS_SESSIONS,
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
from sglang_fp8rl.testing.outputs import differences
from sglang_fp8rl.wire.bucket import serialize

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200), pytest.mark.xdist_group("server")]

DOWN = "model.layers.0.mlp.down_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
UPDATE = "/update_weights_from_tensor"


@pytest.fixture
def case(server, checkpoint_dir) -> Served:
    """The server, which takes a full update after each test and is whole again."""
    case = served(server, checkpoint_dir)
    with first_weights_afterwards(case):
        yield case


def refused(case: Served, body: dict, *words: str) -> str:
    """Send and expect HTTP 400 with `success: false`, all of `words`, and a status that knows."""
    status, answer = case.post(UPDATE, {"load_format": None, "flush_cache": True, **body})
    assert (status, answer["success"]) == (400, False), answer
    for word in words:
        assert word in answer["message"], (word, answer["message"])
    return answer["message"]


def still_says_the_old(case: Served) -> None:
    assert differences(case.ask(), case.expected["first"]) == []


@pytest.mark.parametrize(
    "payload",
    [
        base64.b64encode(b"not a pickle").decode(),
        base64.b64encode(pickle.dumps({"no": "tensors"})).decode(),
    ],
    ids=["no-pickle", "no-tensors"],
)
def test_a_payload_that_cannot_be_read(case, payload):
    """Today this kills SGLang's scheduler."""
    assert refused(case, {"serialized_named_tensors": [payload]})
    still_says_the_old(case)


def test_a_payload_that_is_not_base64(case):
    """Refused by SGLang's own validation of the request."""
    status, answer = case.post(UPDATE, {"serialized_named_tensors": ["not base64 at all"]})
    assert status == 400, answer
    assert answer["message"]
    still_says_the_old(case)


def test_no_payload_at_all(case):
    assert refused(case, {"serialized_named_tensors": []})
    still_says_the_old(case)


def test_shared_memory_that_is_gone(case):
    """The client died after it sent the handle."""
    tensor = torch.ones(256, 512)
    payload = serialize([(DOWN, tensor)])
    handle = tensor.untyped_storage()._share_filename_cpu_()[1]
    gone = base64.b64decode(payload).replace(handle, handle[:-4] + b"gone")
    assert refused(case, {"serialized_named_tensors": [base64.b64encode(gone).decode()]})
    still_says_the_old(case)


def sent(named_tensors) -> dict:
    """The body of a request; the tensors have to outlive it."""
    return {"serialized_named_tensors": [serialize(named_tensors)]}


def test_a_wrong_shape(case):
    tensors = [(DOWN, torch.ones(256, 256))]
    refused(case, sent(tensors), DOWN, "(256, 256)", "(256, 512)")
    still_says_the_old(case)
    assert not case.client.status()["consistent"]


def test_an_unknown_name(case):
    wrong = DOWN.replace("down_proj", "donw_proj")
    tensors = [(wrong, MODEL.first[DOWN])]
    refused(case, sent(tensors), wrong, "Near matches", DOWN)
    still_says_the_old(case)


def test_an_empty_list(case):
    refused(case, sent([]), "empty list")
    still_says_the_old(case)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite(case, value):
    """Every block of it: nothing is stored, so the outputs are the old ones."""
    tensors = [(DOWN, torch.full((256, 512), value))]
    refused(case, sent(tensors), DOWN, "NaN or Inf in 8 of 8", "old bytes")
    still_says_the_old(case)
    state = case.client.status()
    assert state["last_refit"]["outcome"] == "failed"
    assert any(DOWN in problem for problem in state["problems"])


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


def test_load_format_direct_is_refused_with_the_reason(case):
    tensors = [(DOWN, MODEL.second[DOWN])]
    refused(case, {**sent(tensors), "load_format": "direct"}, "leave FP8 scales behind")
    still_says_the_old(case)


def test_a_checkpoint_directory_that_is_not_there(case, tmp_path):
    path = str(tmp_path / "nothing")
    status, answer = case.post("/update_weights_from_disk", {"model_path": path})
    assert (status, answer["success"]) == (400, False), answer
    still_says_the_old(case)


# -- sessions that nobody closes -------------------------------------------------------------------

needs_sessions = pytest.mark.skipif(not HAS_SESSIONS, reason="this SGLang has no sessions")


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


@needs_sessions
def test_a_session_that_ends_with_half_of_an_fp8_pair_fails(case):
    codes = [(GATE, MODEL.first[GATE].to(torch.float8_e4m3fn))]
    assert case.post("/begin_weight_update")[0] == 200
    assert case.post(UPDATE, {**sent(codes), "flush_cache": False})[0] == 200
    status, answer = case.post("/end_weight_update")
    assert (status, answer["success"]) == (400, False), answer
    assert GATE in answer["message"]
    still_says_the_old(case)
