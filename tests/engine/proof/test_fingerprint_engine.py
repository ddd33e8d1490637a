"""The engine's fingerprint is the trainer's, in every layout, and a flipped bit is found by name."""

from __future__ import annotations

import random

import pytest
from support.engine.commands import plan_document
from support.engine.engine_host import EngineHost
from support.engine.fingerprint_commands import (
    fingerprint,
    fingerprint_after_flip,
    names_by_parameter,
)
from support.engine.models import MODELS, checkpoint
from support.engine.options import overridden
from support.engine.pool import engine_key, on, runs_on

from sglang_fp8rl.trainer import fingerprint_of, quantize_for_refit
from sglang_fp8rl.wire.fingerprint import compare
from sglang_fp8rl.wire.plan import RefitPlan

pytestmark = pytest.mark.engine

CASES = ("qwen3-tp1", "qwen3-one-kv-head-tp2", "llama-misaligned-tp2", "qwen3-moe-ep2")
POW2 = overridden(use_weight_pow2_scale=True, round_to_bf16=False)
MORE = (
    "qwen3-tied-tp1",
    "phi3-tp2",
    "qwen3-moe-misaligned-tp2",
    "deepseek-v3-tp2",
    engine_key("llama-misaligned", "tp2", overridden(misaligned="bf16"), "bf16"),
    engine_key("qwen3", "tp2", POW2, "pow2"),
)
FLIPS = 12


def served(host):
    answers = host.call_all(fingerprint)
    assert all(one == answers[0] for one in answers)
    return answers[0]


@on(*CASES, "deepseek-v3-tp1", slow=MORE)
def test_the_engine_has_the_trainer_s_numbers_and_every_flipped_bit_is_found(host):
    plan = RefitPlan.from_dict(host.call(plan_document))
    first = fingerprint_of(host.model.first.items(), plan)
    second = fingerprint_of(host.model.second.items(), plan)
    found = compare(served(host), first)
    assert found.ok, found.as_dict()
    assert not found.unproven
    assert found.compared == len(first.numbers) > 10

    # FP32 into the engine, then FP8 from the trainer: who quantizes doesn't matter.
    host.update_to("second")
    assert compare(served(host), second).ok
    assert not compare(served(host), first).ok
    host.send(list(quantize_for_refit(host.model.first.items(), plan)))
    assert compare(served(host), first).ok

    for rank, place, bit, names in flips(host):
        answers = host.call_all(fingerprint_after_flip, rank, place, bit)
        # Of what was derived from it, too, by a name of its own.
        differing = set(compare(answers[0], first).differing) & set(first.numbers)
        assert len(differing) == 1, (rank, place, bit, differing)
        assert differing <= names, (rank, place, bit, differing)
    served(host)  # derives again from what was flipped back
    assert compare(served(host), first).ok


def flips(host):
    """Seeded: on each rank codes, scales, what stays in high precision, and experts if there are any."""
    rng = random.Random(0)
    for rank, places in enumerate(host.call_all(names_by_parameter)):
        kinds = {
            "codes": [p for p in places if p + "_scale" in places or p + "_scale_inv" in places],
            "scales": [p for p in places if p.endswith(("_scale", "_scale_inv"))],
            "norms": [p for p in places if "norm" in p],
            "experts": [p for p in places if ".experts." in p],
        }
        kinds["other"] = [p for p in places if not any(p in of for of in kinds.values())]
        for kind, chosen in kinds.items():
            assert chosen or kind in ("experts", "other")
            for place in rng.sample(sorted(chosen), min(FLIPS // 4, len(chosen))):
                bits, names = places[place]
                yield rank, place, rng.randrange(bits), names


@on("qwen3-one-kv-head-tp2")
def test_a_replica_that_differs_is_named_with_its_rank(host):
    bit = 8 * (128 * 256 + 5)  # in the rows of k_proj, which both ranks hold
    place = "model.layers.0.self_attn.qkv_proj.weight"
    answer = host.call_all(fingerprint_after_flip, 1, place, bit)[0]
    name = "model.layers.0.self_attn.k_proj.weight"
    assert list(answer.differing) == [name]
    assert "tp_rank 1" in answer.differing[name]
    norm = "model.layers.1.input_layernorm.weight"
    assert list(host.call_all(fingerprint_after_flip, 0, norm, 3)[0].differing) == [norm]
    assert not served(host).differing


@runs_on("qwen3", "qwen3-tp2")
def test_tensor_parallel_sizes_have_the_same_numbers_where_the_scheme_is_the_same(engine_pool):
    with engine_pool.lent(engine_key("qwen3")) as host:
        one = host.call(fingerprint)
    with engine_pool.lent(engine_key("qwen3", "tp2")) as host:
        found = compare(one, served(host))
    assert found.ok
    # Two KV heads of 64 rows are no whole blocks on each of two ranks.
    assert all(".self_attn." in name for name in found.unproven)
    assert found.compared > len(found.unproven) > 0


@on("deepseek-v3-tp1")
def test_a_stale_derived_weight_is_named_and_derived_again(host):
    place = "model.layers.1.self_attn.w_kc"
    assert not served(host).differing
    answer = host.call(fingerprint_after_flip, 0, place, 17)
    assert list(answer.differing) == [place]
    assert not served(host).differing


@runs_on("qwen3", "qwen3-tp1")
def test_dummy_weights_have_numbers_and_differ(checkpoint_dir):
    model = MODELS["qwen3"]
    path = checkpoint(checkpoint_dir, model, "first")
    with EngineHost(path, args=("--load-format", "dummy")) as host:
        plan = RefitPlan.from_dict(host.call(plan_document))
        expected = fingerprint_of(model.first.items(), plan)
        assert not compare(served(host), expected).ok
        host.send(list(model.first.items()))
        assert compare(served(host), expected).ok
