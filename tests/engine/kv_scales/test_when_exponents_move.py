"""Exponents move when the cache is empty and at no other time; what can't be folded is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.engine.commands import begin, end, update
from support.engine.generation import finish
from support.engine.kv_cases import PROMPT, drifted, exponents_of, kv_status, with_fp8_cache
from support.engine.kv_commands import (
    FP8_CACHE,
    adversarial_codes,
    exponents,
    flush,
    start_request,
    unfold,
    unfolded_digests,
)
from support.engine.models import MODELS, checkpoint
from support.engine.options import log_of_a_failed_start
from support.engine.pool import engine_key, on

from sglang_fp8rl.engine.kv_scales.extension import check_arguments
from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.versions import HAS_SESSIONS

pytestmark = pytest.mark.engine


@on(with_fp8_cache("qwen3"))
def test_a_request_that_runs_keeps_the_exponents_until_the_next_flush(host):
    as_loaded = host.call(exponents)
    host.call(start_request, PROMPT)
    items = list(drifted(host.model.second).items())
    if HAS_SESSIONS:
        host.call(begin)
        assert host.call(update, items, None, False)[0]
        assert not kv_status(host)["frozen"]
        assert host.call(end)[0]
        assert kv_status(host)["frozen"]
    else:
        taken, message = host.call(update, items)
        assert not taken
        assert "not flushed" in message
    assert host.call(exponents) == as_loaded
    found = kv_status(host)
    assert (found["certified"], found["follows_weights"]) == (False, False)
    host.call(finish)
    assert host.call(flush)
    assert host.call(exponents) != as_loaded
    found = kv_status(host)
    assert (found["certified"], found["follows_weights"], found["frozen"]) == (True, True, False)
    host.send(list(host.model.second.items()))
    fresh = host.fresh("second")
    assert host.call(exponents) == exponents_of(fresh.status[0])
    assert host.say() == fresh.said


@on(with_fp8_cache("qwen3"))
@pytest.mark.skipif(not HAS_SESSIONS, reason="a session's end flushes by itself")
def test_the_end_of_a_session_flushes_only_if_an_exponent_has_to_move(host):
    def session(items):
        flushes = host.call(_count_flushes)
        host.call(begin)
        assert host.call(update, items, None, False)[0]
        assert host.call(end)[0]
        return host.call(_count_flushes) - flushes

    assert session(list(host.model.first.items())) == 0
    assert kv_status(host)["follows_weights"]
    before = host.call(unfolded_digests)
    assert session(list(drifted(host.model.first).items())) == 1
    assert kv_status(host)["certified"]
    assert session(list(host.model.first.items())) == 1
    assert host.call(unfolded_digests) == before


def _count_flushes(scheduler):
    """How often the cache was emptied since this was first asked."""
    if not hasattr(scheduler, "kv_flushes"):
        scheduler.kv_flushes = 0
        reset = scheduler.tree_cache.reset

        def counted(*args, **kw):
            scheduler.kv_flushes += 1
            return reset(*args, **kw)

        scheduler.tree_cache.reset = counted
    return scheduler.kv_flushes


@on(
    with_fp8_cache("qwen3"),
    with_fp8_cache("qwen2-bias"),
    slow=(with_fp8_cache("llama"), with_fp8_cache("mixtral"), with_fp8_cache("qwen3-moe")),
)
def test_no_input_saturates_and_some_use_half_of_what_there_is(host):
    for items in (host.model.first, drifted(host.model.second, 9)):
        host.send(list(items.items()))
        for largest_key, largest_value, lost in host.call(adversarial_codes):
            assert lost == 0
            assert 448 / 4 < largest_value <= 448
            assert 448 / 8 < largest_key <= 448


@on(with_fp8_cache("qwen3"))
def test_without_the_fold_the_same_inputs_do_saturate(host):
    host.send(list(drifted(host.model.first, 9).items()))
    host.call(unfold)
    host.in_doubt = True
    assert host.call(adversarial_codes)[0][2] > 0


@pytest.mark.parametrize("model", ["gemma3", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_attention_that_was_not_proven_is_refused_at_the_start_by_name(
    model, checkpoint_dir, tmp_path
):
    path = checkpoint(checkpoint_dir, MODELS[model], "first")
    log = log_of_a_failed_start(path, tmp_path / "log", FP8_CACHE)
    assert "kv_scales can't be folded here" in log
    assert "self_attn" in log
    assert "set kv_scales to 'unit'" in log


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_algorithm", "EAGLE"),
        ("enable_hierarchical_cache", True),
        ("enable_lmcache", True),
        ("enable_lora", True),
        ("lora_paths", ["adapter"]),
        ("quantization_param_path", "scales.json"),
        ("disaggregation_mode", "prefill"),
    ],
)
def test_a_server_whose_cache_outlives_or_leaves_its_scales_is_refused(name, value):
    plain = SimpleNamespace(disaggregation_mode="null")
    check_arguments(plain)
    setattr(plain, name, value)
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}.*kv_scales"):
        check_arguments(plain)


def test_the_server_arguments_that_are_refused_exist():
    from sglang.srt.server_args import ServerArgs

    from sglang_fp8rl.engine.kv_scales.extension import REFUSED

    assert {*REFUSED, "disaggregation_mode"} <= set(ServerArgs.__annotations__)


@on(with_fp8_cache("qwen3"))
def test_nothing_of_a_cache_is_read_while_its_memory_is_released(host):
    host.say()
    host.call(_release_cache)
    host.send(list(drifted(host.model.second).items()))
    assert kv_status(host)["follows_weights"]
    host.call(_resume_cache)


def _release_cache(scheduler):
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

    request = ReleaseMemoryOccupationReqInput(tags=["kv_cache"])
    scheduler.weight_updater.release_memory_occupation(request)


def _resume_cache(scheduler):
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    request = ResumeMemoryOccupationReqInput(tags=["kv_cache"])
    scheduler.weight_updater.resume_memory_occupation(request)


def test_exponents_are_for_e4m3_and_nothing_is_folded_beside_it(engine_pool):
    key = engine_key("qwen3")
    with engine_pool.lent(key) as host:
        assert kv_status(host) is None
        assert torch.bfloat16 == host.call(_cache_dtype)


def _cache_dtype(scheduler):
    return scheduler.tp_worker.model_runner.kv_cache_dtype
