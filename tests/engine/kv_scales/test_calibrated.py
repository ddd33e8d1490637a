"""`kv_scales: calibrated`: exponents from a text that the engine runs by itself."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from byte_tokenizer import save_tokenizer
from sglang.srt.server_args import ServerArgs
from support.engine.commands import begin, end, model_of, status, update
from support.engine.engine_host import EngineHost
from support.engine.generation import finish, generate
from support.engine.kv_cases import (
    PROMPT,
    TOKENS,
    calibrated,
    drifted,
    kv_status,
    largest_of,
    with_calibration,
)
from support.engine.kv_commands import (
    FP8_CACHE,
    clear_pool,
    exponents,
    flush,
    pool_codes,
    saturated,
    start_request,
)
from support.engine.models import MODELS, checkpoint
from support.engine.options import log_of_a_failed_start
from support.engine.pool import engine_key, on, runs_on

from sglang_fp8rl.config import MAX_CALIBRATION_TOKENS
from sglang_fp8rl.engine.kv_scales.extension import KvScaling
from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.versions import HAS_SESSIONS

pytestmark = pytest.mark.engine


@runs_on("qwen3")
@pytest.mark.parametrize(
    "model",
    [
        "qwen3",
        *(
            pytest.param(m, marks=pytest.mark.slow)
            for m in ("qwen2-bias", "llama", "mixtral", "qwen3-moe", "phi3")
        ),
    ],
)
def test_what_is_measured_is_what_the_same_tokens_bring_to_the_cache(model, engine_pool):
    with engine_pool.lent(engine_key(model)) as plain:
        seen = plain.call(_largest_of_a_request, TOKENS)
    with engine_pool.lent(with_calibration(model)) as host:
        found = host.call(status)
        for one, (key, value) in zip(largest_of(found), seen, strict=True):
            assert one == pytest.approx((key, value), rel=0.02)
        for (key, value), (a, b) in zip(largest_of(found), host.call(exponents), strict=True):
            assert 448 / 4 < key * 2.0**-a <= 448 / 2
            assert 448 / 4 < value * 2.0**-b <= 448 / 2
        host.call(flush)
        host.call(clear_pool)
        host.call(generate, TOKENS, 4)
        assert host.call(saturated) == 0


def _largest_of_a_request(scheduler, tokens):
    """Independent of how it is measured: what SGLang's own request brings to the attention layers."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found = {}
    layers = [one for one in model_of(scheduler).modules() if isinstance(one, RadixAttention)]
    for layer in layers:

        def forward(q, k, v, *args, layer=layer, **kw):
            found.setdefault(layer.layer_id, (float(k.abs().max()), float(v.abs().max())))
            return type(layer).forward(layer, q, k, v, *args, **kw)

        layer.forward = forward
    generate(scheduler, tokens, 1)
    for layer in layers:
        del layer.forward
    return [found[number] for number in sorted(found)]


@on(with_calibration("qwen3"))
def test_measuring_takes_no_slot_and_touches_no_code(host):
    host.call(flush)
    host.call(clear_pool)
    before = host.call(_free)
    host.send(list(drifted(host.model.second).items()))
    assert host.call(_free) == before
    assert not host.call(_any_code)


def _free(scheduler):
    pools = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    return [one.available_size() for one in pools]


def _any_code(scheduler):
    return any(bool(codes.any()) for pair in pool_codes(scheduler) for codes in pair)


@on(with_calibration("qwen3"))
@pytest.mark.skipif(not HAS_SESSIONS, reason="a session's end measures by itself")
def test_a_request_that_runs_says_the_same_while_a_session_s_end_measures(host):
    host.call(start_request, PROMPT)
    host.call(begin)
    assert host.call(update, list(drifted(host.model.first, 0).items()), None, False)[0]
    codes = host.call(_all_codes)
    assert host.call(end)[0]
    assert host.call(_all_codes) == codes
    assert kv_status(host)["follows_weights"]
    host.call(finish)


def _all_codes(scheduler):
    return [codes.numpy().tobytes() for pair in pool_codes(scheduler) for codes in pair]


@runs_on("qwen3-one-kv-head")
@pytest.mark.slow
def test_one_rank_and_two_choose_the_same_exponents_where_no_binade_is_near(engine_pool):
    keys = [with_calibration("qwen3-one-kv-head", layout) for layout in ("tp1", "tp2")]
    with engine_pool.lent(keys[0]) as one, engine_pool.lent(keys[1]) as two:
        first, second = two.call_all(status)
        assert largest_of(first) == largest_of(second)
        for here, there in zip(largest_of(first), largest_of(one.call(status)), strict=True):
            assert here == pytest.approx(there, rel=0.02)
        assert one.call(exponents) == two.call(exponents)


@on(with_calibration("qwen3"))
def test_a_nan_has_no_exponent(host):
    name = "model.layers.1.self_attn.v_proj.weight"
    host.send([(name, torch.full_like(host.model.first[name], 1e38))])
    side = kv_status(host)["layers"][1]["values"]
    assert (side["exponent"], side["largest"], side["certified"]) == (0, None, False)


def test_without_tokens_the_server_s_tokenizer_reads_a_text_of_its_own(checkpoint_dir, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(checkpoint(checkpoint_dir, MODELS["qwen3"], "first"), path)
    log = log_of_a_failed_start(path, tmp_path / "log", calibrated())
    assert "kv_calibration_tokens" in log
    save_tokenizer(path)
    with EngineHost(path, args=calibrated()) as one, EngineHost(path, args=calibrated()) as two:
        found = one.call(status)["kv_scales"]
        assert found["calibration"]["tokens"] == MAX_CALIBRATION_TOKENS
        assert all(math.isfinite(x) for layer in largest_of({"kv_scales": found}) for x in layer)
        assert two.call(status)["kv_scales"] == found


def test_tokens_that_the_model_does_not_know_are_refused(checkpoint_dir, tmp_path):
    path = checkpoint(checkpoint_dir, MODELS["qwen3"], "first")
    log = log_of_a_failed_start(path, tmp_path / "log", calibrated(kv_calibration_tokens=[3, 512]))
    assert "kv_calibration_tokens: 2 tokens, the largest is 512" in log


def test_ranks_with_requests_of_their_own_are_refused_however_they_are_asked_for(checkpoint_dir):
    """SGLang 0.5.23 turns the first spelling into the second, and says that the first is off."""
    path = checkpoint(checkpoint_dir, MODELS["qwen3"], "first")
    spellings = [("--enable-dp-attention", "--dp-size", "2")]
    if "attn_dp_size" in ServerArgs.__annotations__:
        spellings.append(("--attn-dp-size", "2"))
    for spelling in spellings:
        with EngineHost(path, tp_size=2, args=(*FP8_CACHE, *spelling)) as host:
            for said in host.call_all(_start_calibrated):
                assert "ranks with requests of their own can't run one text together" in said


def _start_calibrated(scheduler):
    scaling = KvScaling(model_of(scheduler).fp8rl_refit)
    scaling.mode = "calibrated"
    with pytest.raises(ConfigError) as refused:
        scaling.start(scheduler.tp_worker.model_runner)
    return str(refused.value)
