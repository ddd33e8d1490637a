"""Ranks may be sent different tensors in one call: slime sends each colocated rank its own experts, and to a rank
without any of a bucket's an empty one."""

from __future__ import annotations

import re

import pytest
import torch
from support.engine.commands import digests, send, serialized, status
from support.engine.pool import on

pytestmark = pytest.mark.engine

EXPERT = re.compile(r"\.experts\.(\d+)\.")


def send_by_rank(scheduler, by_rank, is_flat):
    """One call without a flush, whose payloads are made as slime makes them (`is_flat`) or are plain lists."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    def payload(tensors):
        if not is_flat:
            return tensors
        if not tensors:
            return {"flattened_tensor": torch.empty(0, dtype=torch.uint8), "metadata": []}
        flat = FlattenedTensorBucket(named_tensors=tensors)
        return {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}

    texts = [serialized(payload(one), MultiprocessingSerializer.serialize) for one in by_rank]
    return send(scheduler, texts, "flattened_bucket" if is_flat else None, False)


def flush(scheduler):
    return scheduler.flush_cache()


def buckets_by_rank(weights):
    """First what all ranks get, then each expert for the rank of two that has it."""
    experts = {int(found[1]) for name in weights if (found := EXPERT.search(name))}
    shared = [item for item in weights.items() if not EXPERT.search(item[0])]
    yield [shared, shared]
    for expert in sorted(experts):
        own = [item for item in weights.items() if f".experts.{expert}." in item[0]]
        yield [own, []] if 2 * expert < len(experts) else [[], own]


@pytest.mark.parametrize("is_flat", [True, False])
@on("qwen3-moe-ep2")
def test_a_rank_that_has_none_of_a_call_s_experts_may_be_sent_nothing(host, is_flat):
    for which in ("second", "first", "second"):
        for by_rank in buckets_by_rank(getattr(host.model, which)):
            assert host.call_all(send_by_rank, by_rank, is_flat) == [(True, "Success")] * 2
        assert host.call_all(digests) == host.fresh(which).digests
        for said in host.call_all(status):
            assert said["state"] == "whole", said["problems"]
            assert said["last_refit"]["outcome"] == "ok"


@pytest.mark.parametrize("is_flat", [True, False])
@on("qwen3-tp1", "qwen3-tp2")
def test_a_call_that_brings_no_rank_anything_is_refused(host, is_flat):
    before = host.call_all(digests)
    for success, message in host.call_all(send_by_rank, [[]] * host.tp_size, is_flat):
        assert not success
        assert "empty list" in message
    assert host.call_all(digests) == before
    assert all(one["state"] == "failed" for one in host.call_all(status))


@on("qwen3-tp2")
def test_ranks_that_are_sent_different_lists_still_know_whether_they_are_in_one_refit(host):
    first, second = (list(one.items()) for one in (host.model.first, host.model.second))
    assert all(host.call_all(flush))
    assert host.call_all(send_by_rank, [first, first], True) == [(True, "Success")] * 2
    assert host.call_all(send_by_rank, [second, []], True) == [(True, "Success")] * 2
    assert host.call_all(send_by_rank, [second, second], True) == [(True, "Success")] * 2
    assert all(one["state"] == "whole" for one in host.call_all(status))
    assert host.call_all(send_by_rank, [[], first], True) == [(True, "Success")] * 2
    ranks = host.call_all(status)
    assert [one["state"] for one in ranks] == ["open"] * 2
    assert ranks[0]["last_refit"]["missing"] > 0
    assert host.call_all(send_by_rank, [first, first], True) == [(True, "Success")] * 2
    assert all(one["state"] == "whole" for one in host.call_all(status))
    assert host.call_all(digests) == host.fresh("first").digests


def announce(scheduler, names, dtypes, shapes):
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

    request = UpdateWeightsFromDistributedReqInput(names=names, dtypes=dtypes, shapes=shapes)
    answer = scheduler.weight_updater.update_weights_from_distributed(request)
    return answer.success, answer.message


@on("qwen3-tp2")
def test_a_broadcast_with_fewer_dtypes_or_shapes_than_names_is_not_cut_to_them(host):
    two, shape = ["model.norm.weight", "model.embed_tokens.weight"], [[4], [4, 4]]
    before = host.call_all(digests)
    for names, dtypes, shapes in ((two, ["float32"], shape), (two, ["float32"] * 2, shape[:1])):
        for success, message in host.call_all(announce, names, dtypes, shapes):
            assert not success
            assert message.startswith("names, dtypes and shapes: [2, ")
    assert host.call_all(digests) == before
