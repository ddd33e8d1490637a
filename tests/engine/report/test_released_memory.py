"""Weights whose memory was released and resumed hold anything: the status says so until all came again.

SGLang's own request handlers; its memory saver pages CUDA memory only, so the bytes are spoiled here.
"""

import pytest
from commands import (
    begin,
    digests,
    end,
    model_of,
    release_and_resume,
    scribble,
    status,
    update,
    update_from_disk,
)
from models import MODELS
from pool import engine_key, on

pytestmark = pytest.mark.engine

MODEL = MODELS["qwen3"]
BACKED_UP = engine_key("qwen3", args=("--enable-weights-cpu-backup",), label="backup")


@on("qwen3-tp1")
@pytest.mark.parametrize(("tags", "replayed"), [(["weights"], False), (None, True)])
def test_released_weights_are_missing_until_all_of_them_came(host, tags, replayed):
    fresh = host.call(digests)
    items = list(MODEL.first.items())
    buckets = [items[: len(items) // 2], items[len(items) // 2 :]]
    if replayed:
        for bucket in buckets:
            assert host.call(update, bucket)[0]
    host.call(release_and_resume, tags, True)
    host.call(scribble)
    state = host.call(status)
    assert not state["consistent"]
    assert "never loaded" in state["problems"][0]
    assert host.call(update, buckets[0])[0]
    assert not host.call(status)["consistent"]
    assert host.call(update, buckets[1])[0]
    assert host.call(status)["consistent"], host.call(status)["problems"]
    assert host.call(digests) == fresh


@on("qwen3-tp1")
@pytest.mark.parametrize(
    ("tags", "is_paged"), [(["kv_cache"], True), (["weights"], False)], ids=["cache", "not paged"]
)
def test_weights_that_stayed_are_not_missing(host, tags, is_paged):
    host.call(release_and_resume, tags, is_paged)
    assert host.call(status)["consistent"], host.call(status)["problems"]


@on(BACKED_UP)
def test_weights_that_were_kept_on_the_cpu_are_not_missing(host):
    host.call(release_and_resume, ["weights"], True)
    assert host.call(status)["consistent"], host.call(status)["problems"]


def while_released(scheduler, act, *args):
    """What `act` answers while the memory of the weights is released, and how often a weight was read."""
    updater = scheduler.weight_updater
    refit = model_of(scheduler).fp8rl_refit
    reads, native = [], refit.memory_number
    refit.memory_number = lambda: reads.append(1) or native()
    updater.offload_tags.add("weights")
    try:
        return *act(scheduler, *args), len(reads)
    finally:
        updater.offload_tags.remove("weights")
        refit.memory_number = native


@on("qwen3-tp2")
def test_nothing_touches_weights_while_their_memory_is_released(host):
    before = host.call_all(digests)
    requests = [(update, list(MODEL.second.items())), (update_from_disk, "anywhere")]
    if host.call(has_sessions):
        requests.append((begin,))
    for act, *args in requests:
        for success, message, reads in host.call_all(while_released, act, *args):
            assert not success
            assert "memory is released" in message
            assert not reads
    assert host.call_all(digests) == before
    assert host.call(status)["state"] == "failed"


@on("qwen3-tp2")
def test_a_session_can_be_ended_once_the_memory_is_back(host):
    if not host.call(has_sessions):
        pytest.skip("this SGLang has no sessions")
    assert host.call(begin)[0]
    for success, message, _ in host.call_all(while_released, end):
        assert not success
        assert "memory is released" in message
    assert host.call(end)[0]
    assert host.call(status)["state"] == "whole"


def has_sessions(scheduler):
    return hasattr(scheduler.weight_updater, "begin_weight_update")
