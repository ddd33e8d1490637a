"""Weights whose memory was released and resumed hold anything: the status says so until all came again.

SGLang's own request handlers; its memory saver pages CUDA memory only, so the bytes are spoiled here, at
the moment in which they would come back.
"""

from types import SimpleNamespace

import pytest
import torch
from support.engine.commands import (
    begin,
    digests,
    end,
    model_of,
    release_and_resume,
    served_tensors,
    status,
    update,
    update_from_disk,
)
from support.engine.injection import INJECTED, injected_in
from support.engine.kv_cases import kv_status
from support.engine.kv_commands import FP8_CACHE
from support.engine.pool import engine_key, needs_sessions, on

from sglang_fp8rl.versions import HAS_SESSIONS

pytestmark = pytest.mark.engine

BACKED_UP = engine_key("qwen3", args=("--enable-weights-cpu-backup",), label="backup")
BY_TAGS = [["weights"], ["kv_cache"]]


def spoil(scheduler):
    """Fill all memory of the model with rubbish, NaN among it."""
    generator = torch.Generator().manual_seed(0)
    # Some are no rows and columns in their memory.
    for tensor in served_tensors(scheduler).values():
        data = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        data.copy_(torch.randint(0, 256, data.shape, generator=generator, dtype=torch.uint8))


def halves(state):
    items = list(state.items())
    return [items[: len(items) // 2], items[len(items) // 2 :]]


def replayed(host):
    return host.call(status)["replay"]["calls"]


WITH_FP8_CACHE = engine_key("qwen3", args=FP8_CACHE, label="fp8-cache")


@on("qwen3-tp1", "deepseek-v3-tp1", WITH_FP8_CACHE, slow=("deepseek-v3-tp2", "qwen3-moe-tp1"))
@pytest.mark.parametrize("tags", [["weights"], None, BY_TAGS], ids=["weights", "all", "by tags"])
def test_a_colocated_trainer_replays_and_nothing_old_is_served(host, tags):
    """Sleep, rubbish, wake, refit: whole when all came, byte for byte a fresh start, and no loader ran."""
    for bucket in halves(host.model.first):
        host.send(bucket)
    for which in ("second", "first"):
        fresh, recipes = host.fresh(which), host.call(status)["replay"]["recipes"]
        before = host.call(status)["replay"]["native_calls"]
        host.call_all(release_and_resume, tags, True, spoil)
        state = host.call(status)
        assert (state["state"], state["replay"]["recipes"]) == ("unloaded", recipes)
        assert "never loaded" in state["problems"][0]
        first, last = halves(getattr(host.model, which))
        calls = replayed(host)
        host.send(first)
        assert host.call(status)["state"] != "whole"
        host.send(last)
        assert host.call(status)["state"] == "whole", host.call(status)["problems"]
        assert (replayed(host), host.call(status)["replay"]["native_calls"]) == (calls + 2, before)
        assert host.call_all(digests) == fresh.digests
    assert host.say() == fresh.said


@on(WITH_FP8_CACHE)
def test_exponents_are_certified_for_no_weights_but_those_that_are_there(host):
    assert kv_status(host)["certified"]
    host.call_all(release_and_resume, ["weights"], True, spoil)
    found = kv_status(host)
    assert (found["certified"], found["follows_weights"]) == (False, False)
    host.update_to("first")
    assert kv_status(host)["certified"]


def consistent(scheduler):
    """What `/metrics` says of it, where SGLang collects metrics."""
    from prometheus_client import REGISTRY

    labels = {"model_name": "released"}
    collector = SimpleNamespace(labels=labels, observe_weight_load=lambda *_: None)
    scheduler.weight_updater.metrics_collector = collector
    return REGISTRY.get_sample_value("sglang:fp8rl_consistent", labels)


@on("qwen3-tp1")
def test_the_metrics_say_so_too(host):
    host.call(consistent)
    for _ in range(2):
        host.update_to("first")
        assert host.call(consistent) == 1
        host.call(release_and_resume, ["weights"], True)
        assert host.call(consistent) == 0
    host.in_doubt = True


@on("deepseek-v3-tp1", WITH_FP8_CACHE)
def test_a_server_may_sleep_before_its_first_update(host):
    """veRL's first step: start, sleep, wake, update."""
    host.call_all(release_and_resume, None, True, spoil)
    host.update_to("second")
    assert host.call(status)["state"] == "whole", host.call(status)["problems"]
    assert host.call_all(digests) == host.fresh("second").digests


@on("qwen3-tp1")
def test_a_recipe_is_dropped_where_the_memory_came_back_elsewhere(host):
    host.in_doubt = True  # a weight has moved
    host.update_to("first")
    host.call_all(release_and_resume, None, True, spoil)
    host.call(move_a_scale)
    for calls in (0, 1):
        host.update_to("second")
        assert host.call(status)["replay"]["recipes"] == 1
        assert replayed(host) == calls
    assert host.call_all(digests) == host.fresh("second").digests


def move_a_scale(scheduler):
    scale = next(
        one for name, one in model_of(scheduler).named_parameters() if name.endswith("_scale_inv")
    )
    scale.data = scale.data.clone()


@on("qwen3-tp1")
def test_constants_that_no_update_sends_come_back(host):
    host.in_doubt = True  # they stay
    host.call(give_a_constant)
    host.call_all(release_and_resume, None, True, spoil)
    assert host.call(constant) == 0.5


@on("qwen3-tp2")
def test_what_a_resume_raises_on_one_rank_every_rank_says(host):
    """SGLang's answer to it has no room for an error, and its scheduler ends with what is raised."""
    name = "model.kept_copies:KeptCopies.put_constants_back"
    host.call_all(injected_in, name, 1, release_and_resume, ["weights"], True, spoil)
    for rank in host.call_all(status):
        assert rank["state"] == "failed"
        assert any(INJECTED in text for text in rank["problems"])
    host.update_to("first")
    assert host.call(status)["state"] == "whole"


def give_a_constant(scheduler):
    """As Gemma 4 has two: a plain attribute, made when the model is."""
    model_of(scheduler).model.per_layer_input_scale = torch.tensor(0.5)


def constant(scheduler):
    return model_of(scheduler).model.per_layer_input_scale.item()


@on("qwen3-tp1")
@pytest.mark.parametrize(
    ("tags", "is_paged"), [(["kv_cache"], True), (["weights"], False)], ids=["cache", "not paged"]
)
def test_weights_that_stayed_are_not_missing(host, tags, is_paged):
    host.call(release_and_resume, tags, is_paged)
    assert host.call(status)["consistent"], host.call(status)["problems"]


@on(BACKED_UP)
def test_weights_that_were_kept_on_the_cpu_are_not_missing(host, engine_pool):
    host.update_to("first")
    host.call(release_and_resume, ["weights"], True)
    assert host.call(status)["consistent"], host.call(status)["problems"]
    host.update_to("second")
    assert replayed(host) == 1
    expected = engine_pool.fresh(engine_key("qwen3"))  # the backup changes nothing that is served
    assert host.call_all(digests) == expected.digests
    assert host.say() == expected.said


def while_released(scheduler, act, *args):
    """What `act` answers while the memory of the weights is released, and how often a weight was read."""
    updater = scheduler.weight_updater
    refit = model_of(scheduler).fp8rl_refit
    reads, native = [], refit.written_targets
    refit.written_targets = lambda: reads.append(1) or native()
    updater.offload_tags.add("weights")
    try:
        return *act(scheduler, *args), len(reads)
    finally:
        updater.offload_tags.remove("weights")
        refit.written_targets = native


@on("qwen3-tp2")
def test_nothing_touches_weights_while_their_memory_is_released(host):
    before = host.call_all(digests)
    requests = [(update, list(host.model.second.items())), (update_from_disk, "anywhere")]
    if HAS_SESSIONS:
        requests.append((begin,))
    for act, *args in requests:
        for success, message, reads in host.call_all(while_released, act, *args):
            assert not success
            assert "memory is released" in message
            assert not reads
    assert host.call_all(digests) == before
    assert host.call(status)["state"] == "failed"


@on("qwen3-tp2")
@needs_sessions
def test_a_session_can_be_ended_once_the_memory_is_back(host):
    assert host.call(begin)[0]
    for success, message, _ in host.call_all(while_released, end):
        assert not success
        assert "memory is released" in message
    assert host.call(end)[0]
    assert host.call(status)["state"] == "whole"
