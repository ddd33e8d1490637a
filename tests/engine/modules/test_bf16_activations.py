"""Activations in BF16: other words from the same bytes, for all modules or for those that are named."""

from __future__ import annotations

import pytest
from support.engine.commands import plan_document, status
from support.engine.fingerprint_commands import fingerprint
from support.engine.options import overridden
from support.engine.pool import EngineKey, engine_key, on

pytestmark = pytest.mark.engine

NAMED = [r"re:.*\.mlp\..*", "model.layers.0.self_attn.o_proj"]


def engine(model: str, layout: str = "tp1", label: str = "bf16", **options) -> EngineKey:
    return engine_key(model, layout, overridden(**options), label)


def with_all(model: str, layout: str = "tp1", **options) -> EngineKey:
    label = "-".join(["bf16", *options])
    return engine(model, layout, label, activations="bf16", **options)


def without(key: EngineKey) -> EngineKey:
    """The same engine, whose activations are quantized."""
    options = {"granularity": "per_channel"} if "granularity" in key.label else {}
    return engine(key.model.name, key.layout.name, "-".join(["fp8", *options]), **options)


def kept(host) -> set[str]:
    return {row["module"] for row in host.call(status)["plan"] if row["activations"] == "bf16"}


ENGINES = (
    with_all("qwen3"),
    with_all("qwen3", exact_product_tokens=0),
    with_all("qwen2-bias", granularity="per_channel"),
    with_all("qwen3-moe"),
    with_all("llama-misaligned", "tp2"),
)
SLOW = (
    with_all("qwen2-bias", "tp2"),
    with_all("qwen3-moe-misaligned", "tp2"),
    with_all("deepseek-v3"),
    engine("qwen3", label="named", bf16_activations=NAMED),
)


@on(*ENGINES, slow=SLOW)
def test_the_bytes_are_those_of_quantized_activations_and_the_words_are_not(host, engine_pool):
    other = engine_pool.fresh(without(host.key), "first")
    assert host.as_loaded.digests == other.digests
    assert host.as_loaded.said != other.said


@on(*ENGINES, slow=SLOW)
def test_a_replayed_refit_is_a_fresh_start(host):
    host.update_to("second", "first", "second")
    assert host.call(status)["replay"]["calls"] == 2
    host.check_fresh("second")


@on(with_all("qwen3"))
def test_what_a_trainer_reads_of_the_weights_is_the_same(host, engine_pool):
    plan, proof = host.call(plan_document), host.call(fingerprint)
    with engine_pool.lent(without(host.key)) as other:
        other_plan, other_proof = other.call(plan_document), other.call(fingerprint)
    assert proof == other_proof
    for part in ("tensors", "fp8_bytes", "left_out", "parallel", "model"):
        assert plan[part] == other_plan[part]
    rows = [{**row, "activations": "fp8"} for row in plan["modules"]]
    assert rows == other_plan["modules"] != plan["modules"]


@on(engine("qwen3", label="named", bf16_activations=NAMED))
def test_named_modules_keep_their_activations_and_no_others(host):
    assert kept(host) == {
        *(f"model.layers.{n}.mlp.{leaf}" for n in (0, 1) for leaf in ("gate_up_proj", "down_proj")),
        "model.layers.0.self_attn.o_proj",
    }
    assert {row["scheme"] for row in host.call(status)["plan"]} == {"blockwise"}


@on(engine("qwen3", label="ignored", ignored_layers=["model.layers.0"], bf16_activations=NAMED))
def test_a_module_in_high_precision_is_named_with_its_own_reason(host):
    rows = {row["module"]: row for row in host.call(status)["plan"]}
    row = rows["model.layers.0.mlp.down_proj"]
    assert (row["scheme"], row["activations"]) == ("high_precision", "bf16")
    assert "ignored_layers" in row["reason"]
    assert rows["model.layers.1.mlp.down_proj"]["activations"] == "bf16"
    assert rows["model.layers.1.self_attn.qkv_proj"]["activations"] == "fp8"
