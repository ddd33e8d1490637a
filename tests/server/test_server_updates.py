"""Every update path over a real server: afterwards it says what a fresh one says, to the last bit."""

from __future__ import annotations

import random

import pytest
import torch
from block_fp8 import quantized
from support.by_definition import quantize_blockwise
from support.engine.models import checkpoint
from support.server.distributed_trainer import DistributedTrainer
from support.server.served import MODEL, PROMPTS, weights

from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.lab.testing.outputs import differences
from sglang_fp8rl.wire.handles import serialize

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200), pytest.mark.xdist_group("server")]

WIRES = {
    "one-tensor-per-call": {"bucket_bytes": 1},
    "buckets": {"bucket_bytes": 1 << 20},
    "one-bucket": {"bucket_bytes": 1 << 40},
}
SMALL_BUCKETS = {"bucket_bytes": 300_000}


def shuffled(tensors):
    tensors = list(tensors)
    random.Random(0).shuffle(tensors)
    return tensors


def test_a_server_that_was_never_updated_says_so(case):
    state = case.client.status()
    assert state["schemes"] == {"blockwise": 4 * MODEL.config.num_hidden_layers}
    assert state["fp8_bytes"] * 2 == state["bf16_bytes_replaced"] > 0
    assert state["consistent"], state["problems"]
    assert {entry["scheme"] for entry in state["plan"]} == {"blockwise"}


def test_the_two_weight_sets_can_be_told_apart(case):
    """Or no other test here proves anything."""
    assert len(differences(case.expected["first"], case.expected["second"])) == len(PROMPTS)


@pytest.mark.parametrize("wire", WIRES)
def test_fp32_weights_in_buckets_equal_a_fresh_server(case, client, wire):
    for which, order in (("second", shuffled), ("first", list)):
        sent = client.update(order(weights(which)), **WIRES[wire])
        case.check(which)
        last = case.client.status()["last_refit"]
        assert (last["tensors"], last["bytes"]) == (sent.tensors, sent.nbytes)


@pytest.mark.parametrize("size", [1, 9], ids=["one-tensor-per-call", "nine"])
def test_named_tensors_equal_a_fresh_server(case, session, size):
    """Pickled one by one, as SGLang's own clients do."""
    for which in ("second", "first"):
        tensors = [(name, tensor.clone()) for name, tensor in shuffled(weights(which))]
        if session:
            assert case.post("/begin_weight_update")[0] == 200
        for at in range(0, len(tensors), size):
            body = {"serialized_named_tensors": [serialize(tensors[at : at + size])]}
            body["flush_cache"] = at + size >= len(tensors)
            status, answer = case.post("/update_weights_from_tensor", body)
            assert (status, answer["success"]) == (200, True), answer
        if session:
            assert case.post("/end_weight_update")[0] == 200
        case.check(which)


def test_bf16_weights_equal_a_fresh_server(case, client):
    for which in ("second", "first"):
        client.update(weights(which, torch.bfloat16), **SMALL_BUCKETS)
        case.check(which)


def test_weights_the_trainer_quantized_equal_a_fresh_server(case, client):
    """Shuffled, so that most scales come in another bucket than their weights."""
    for which in ("second", "first"):
        pairs = quantized(getattr(MODEL, which), quantize_blockwise)
        client.update(shuffled(pairs.items()), **SMALL_BUCKETS)
        case.check(which)


def test_an_update_from_disk_equals_a_fresh_server(case, checkpoint_dir):
    for which in ("second", "first"):
        path = str(checkpoint(checkpoint_dir, MODEL, which))
        status, answer = case.post("/update_weights_from_disk", {"model_path": path})
        assert (status, answer["success"]) == (200, True), answer
        case.check(which)


def test_weights_broadcast_by_a_trainer_equal_a_fresh_server(case, session):
    with DistributedTrainer(case) as trainer:
        for which, load_format in (("second", None), ("first", "flattened_bucket")):
            tensors = weights(which)
            if session:
                assert case.post("/begin_weight_update")[0] == 200
            for bucket in (tensors[:9], tensors[9:]):
                status, answer = trainer.send(bucket, load_format=load_format)
                assert (status, answer["success"]) == (200, True), answer
            if session:
                assert not case.client.status()["consistent"]
                assert case.post("/end_weight_update")[0] == 200
            case.check(which)


def test_the_radix_cache_of_the_old_weights_is_flushed(case, client):
    prompt = [7 * i % 500 for i in range(100)]

    def cached_tokens() -> int:
        answer = case.client.generate(prompt, logprob_start_len=None)
        return answer["meta_info"]["cached_tokens"]

    cached_tokens()
    assert cached_tokens() > 90
    client.update(weights("second"))
    assert cached_tokens() == 0
    assert cached_tokens() > 90
    client.update(weights("first"))
    assert cached_tokens() == 0


def test_an_update_that_leaves_something_out_is_refused_by_name_until_all_came(case, client):
    tensors = weights("second")
    for part in (tensors[:10], tensors[10:]):  # of two refits, so they are no whole one
        missing = dict(tensors).keys() - dict(part).keys()
        with pytest.raises(RefitError, match="left out"):
            client.update(part)
        state = case.client.status()
        assert (state["state"], state["last_refit"]["outcome"]) == ("failed", "failed")
        named = state["last_refit"]["missing_names"]
        assert named
        assert missing.issuperset(named)
    assert differences(case.ask(), case.expected["second"]) == []
    client.update(weights("first"))
    case.check("first")


def test_a_partial_update_declares_the_rest_right(case, client):
    before = case.client.status()["last_complete_refit"]
    client.update(weights("first")[:10], partial=True, weight_version="some")
    state = case.client.status()
    assert state["consistent"], state["problems"]
    last = state["last_refit"]
    assert (last["outcome"], last["complete"], last["partial"]) == ("ok", False, True)
    assert last["version"] == "some"
    assert state["last_complete_refit"] == before
    assert [row["refit"] for row in state["served"]] == [last["id"], before["id"]]
    client.update(weights("first"))
    case.check("first")
