"""The laws of folding, by bytes, on real engines (`docs/kv_cache.md`)."""

from __future__ import annotations

import pytest
import torch
from support.engine.commands import digests, status, update
from support.engine.kv_cases import (
    LONGER,
    drifted,
    exponents_of,
    largest_of,
    with_calibration,
    with_fp8_cache,
)
from support.engine.kv_commands import (
    FP8_CACHE,
    checksums,
    clear_pool,
    exponents,
    flush,
    fold_at_random,
    generate_cached,
    poison,
    saturated,
    scale_around_attention,
    stored_rows,
    unfold,
    unfolded_digests,
    weights_by_name,
)
from support.engine.models import MODELS
from support.engine.options import overridden
from support.engine.pool import engine_key, on, runs_on

pytestmark = pytest.mark.engine


CHOSEN = (with_fp8_cache("qwen3"), with_calibration("qwen3"))
UNIT = engine_key("qwen3", "tp1", (*FP8_CACHE, *overridden(kv_scales="unit")), "unit")


@on(
    "qwen3-tp1",
    "llama-misaligned-tp2",
    slow=(
        "qwen2-bias-tp1",
        "qwen3-tp2",
        "qwen3-one-kv-head-tp2",
        "qwen3-tied-tp1",
        "llama-tp1",
        "llama-misaligned-tp1",
        "mistral-tp1",
        "mixtral-tp1",
        "phi3-tp1",
        "qwen3-moe-tp1",
        "qwen2.5-vl-tp1",
        engine_key("qwen3", "tp1", overridden(num_first_layers_in_bf16=1), "a-layer-in-bf16"),
        engine_key("qwen2-bias", "tp1", overridden(granularity="per_channel"), "per-channel"),
    ),
)
def test_with_a_bf16_cache_folded_and_unfolded_say_the_same(host):
    config = host.model.config
    layers = getattr(config, "text_config", config).num_hidden_layers
    for seed in range(3):
        drawn = host.call_all(fold_at_random, seed)
        assert len(drawn[0]) == layers
        assert host.call_all(digests) != host.as_loaded.digests
        assert host.say() == host.as_loaded.said, drawn[0]
        host.call_all(unfold)
        assert host.call_all(digests) == host.as_loaded.digests


@on(
    *CHOSEN,
    slow=(
        with_fp8_cache("qwen2-bias"),
        with_fp8_cache("qwen3", "tp2"),
        with_calibration("qwen2-bias"),
        with_calibration("qwen3", "tp2"),
    ),
)
def test_a_refit_ends_with_the_exponents_the_bytes_and_the_words_of_a_fresh_start(host):
    far = list(drifted(host.model.second).items())
    buckets = [far[at::5] for at in range(5)]
    for which, bucket in enumerate(reversed(buckets)):
        host.send(bucket, None, which == 4)
    moved = host.call_all(exponents)
    host.call(poison)  # whatever lies in the cache has no say
    fresh = host.fresh("second")
    assert moved != [exponents_of(one) for one in host.as_loaded.status]
    assert moved != [exponents_of(one) for one in fresh.status]
    host.update_to("second")
    assert host.call_all(exponents) == [exponents_of(one) for one in fresh.status]
    found = host.call(status)
    assert largest_of(found) == largest_of(fresh.status[0])
    assert host.call_all(digests) == fresh.digests
    assert host.say() == fresh.said
    assert found["kv_scales"]["certified"] or found["kv_scales"]["mode"] == "calibrated"
    assert found["kv_scales"]["follows_weights"]


@runs_on("qwen3")
def test_what_is_read_is_what_was_sent_whatever_happened_to_the_update(engine_pool):
    model = MODELS["qwen3"]
    spoiled = dict(model.second)
    name = "model.layers.1.self_attn.v_proj.weight"
    spoiled[name] = torch.full_like(spoiled[name], float("nan"))
    with (
        engine_pool.lent(with_fp8_cache("qwen3")) as folded,
        engine_pool.lent(engine_key("qwen3")) as plain,
    ):
        for items in (
            [(key, model.second[key]) for key in model.second if "k_proj" in key],
            [(key, model.second[key]) for key in model.second if "norm" in key],
            list(spoiled.items()),
        ):
            answers = [one.call_all(update, items) for one in (folded, plain)]
            assert answers[0] == answers[1]
            assert folded.call(digests) != plain.call(digests)
            assert folded.call(unfolded_digests) == plain.call(digests)
            assert folded.call(checksums) == plain.call(checksums)
            assert folded.call(weights_by_name, "model.layers.0.self_attn.k_norm.weight") == (
                plain.call(weights_by_name, "model.layers.0.self_attn.k_norm.weight")
            )


@runs_on("qwen3")
def test_the_fold_is_a_scale_around_attention_in_words_and_in_stored_rows(engine_pool):
    with engine_pool.lent(with_fp8_cache("qwen3")) as folded:
        powers = folded.call(exponents)
        assert any(a and b for a, b in powers)
        folded.call(flush)
        folded.call(clear_pool)
        said, rows = folded.say(), folded.call(stored_rows)
        assert folded.call(saturated) == 0
    with engine_pool.lent(UNIT) as reference:
        assert reference.call(status)["kv_scales"] is None
        assert reference.say() != said
        reference.call(scale_around_attention, powers)
        reference.call(flush)
        reference.call(clear_pool)
        reference.in_doubt = True
        assert reference.say() == said
        assert reference.call(stored_rows) == rows


@runs_on("qwen3-one-kv-head")
def test_one_rank_and_two_choose_the_same_exponents(engine_pool):
    keys = [with_fp8_cache("qwen3-one-kv-head", layout) for layout in ("tp1", "tp2")]
    with engine_pool.lent(keys[0]) as one, engine_pool.lent(keys[1]) as two:
        for drift in (0, 9):
            items = list(drifted(one.model.second, drift).items())
            one.send(items)
            two.send(items)
            first, second = two.call_all(exponents)
            assert one.call(exponents) == first == second


@on(*CHOSEN)
def test_no_prefix_survives_a_change_of_exponents(host):
    """Exponents move there and back: what the pool held in between, poisoned, is never read."""
    first, hit = host.call(generate_cached, LONGER, 4)
    again, hit_again = host.call(generate_cached, LONGER, 4)
    assert hit == 0
    assert hit_again > 0
    assert again == first
    before = host.call(exponents)
    host.send(list(drifted(host.model.first).items()))
    assert host.call(exponents) != before
    host.call(poison)
    _, hit = host.call(generate_cached, LONGER, 4)
    assert hit == 0
    host.send(list(host.model.first.items()))
    host.call(poison)
    assert host.call(generate_cached, LONGER, 4) == (first, 0)
    assert host.call(status)["kv_scales"]["moves"] >= 2


@on(
    with_fp8_cache("qwen3", "tp2"),
    slow=(engine_key("qwen3", "tp2", label="radix", radix_cache=True),),
)
def test_where_one_rank_fails_all_ranks_flush_and_go_on_alike(host):
    """And none chooses exponents without the one that refused."""
    host.call_all(generate_cached, LONGER, 4)
    name = "model.layers.1.self_attn.v_proj.weight"
    spoiled = drifted(host.model.second)
    spoiled[name] = spoiled[name].clone()
    spoiled[name][-1] = float("nan")  # a row of the last rank
    host.refuses(list(spoiled.items()), name)
    first, second = host.call_all(generate_cached, LONGER, 4)
    assert first == second
    assert first[1] == 0  # no hit: what the old weights computed is gone
    if host.call(status)["kv_scales"] is not None:
        first, second = host.call_all(exponents)
        assert first == second
        assert (
            first[0][1] != host.as_loaded.status[0]["kv_scales"]["layers"][0]["values"]["exponent"]
        )
    host.update_to("second")
    assert host.call_all(digests) == host.fresh("second").digests
