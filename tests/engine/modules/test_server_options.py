"""Options: good ones decide the schemes at start and at every update, wrong ones stop the server."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.engine.commands import digests, status
from support.engine.engine_host import EngineHost
from support.engine.models import MODELS, checkpoint
from support.engine.options import log_of_a_failed_start, overridden
from support.engine.pool import engine_key, on, runs_on
from support.server.served import QUANTIZED

from sglang_fp8rl.errors import HostError
from sglang_fp8rl.lab.testing.server import ServerProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


# -- wrong options ---------------------------------------------------------------------------------


def check_one_error(log: str, words: Sequence[str]) -> None:
    lines = {line for line in log.splitlines() if "sglang_fp8rl.errors." in line}
    assert len(lines) == 1, log[-4000:]
    line = lines.pop()
    assert [word for word in words if word not in line] == [], line


@pytest.mark.slow
def test_an_unknown_key_stops_the_server_with_one_clear_line(checkpoint_dir, tmp_path):
    """A real server, to its end."""
    path = checkpoint(checkpoint_dir, MODELS["qwen3"], "first")
    args = (QUANTIZED, *overridden(misalign="bf16"))
    log = tmp_path / "server.log"
    with pytest.raises(HostError, match="before it was healthy"):
        ServerProcess(path, args, log_path=log).start()
    words = ("'misalign'", "known keys are weight_block_size, ", "Did you mean 'misaligned'?")
    check_one_error(log.read_text(errors="replace"), words)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("qwen3", {"weight_block_size": [64, 64]}, ["weight_block_size", "[64, 64]", "[128, 128]"]),
        (
            "qwen3",
            {"ignored_layers": ["model.layers.7.mlp"]},
            ["ignored_layers", "'model.layers.7.mlp'", "matches none", "model.layers.0.self_attn"],
        ),
        (
            "qwen3",
            {"ignored_layers": ["re:.*k_proj"]},
            ["qkv_proj", "['k_proj']", "one scheme", "Name all of"],
        ),
        (
            "llama-misaligned",
            {"misaligned": "error"},
            ["model.layers.0.self_attn.qkv_proj", "128", "misaligned"],
        ),
        (
            "qwen3",
            {"bf16_activations": ["model.layers.7"]},
            ["bf16_activations", "matches none"],
        ),
        (
            "qwen3",
            {"bf16_activations": ["re:.*k_proj"]},
            ["qkv_proj", "bf16_activations covers"],
        ),
    ],
    ids=[
        "block-size",
        "pattern-without-module",
        "part-of-a-fused-module",
        "misaligned-error",
        "bf16-pattern-without-module",
        "bf16-part-of-a-fused-module",
    ],
)
def test_wrong_options_stop_the_scheduler_with_one_clear_line(
    checkpoint_dir, tmp_path, model, options, words
):
    path = checkpoint(checkpoint_dir, MODELS[model], "first")
    log = log_of_a_failed_start(path, tmp_path / "scheduler.log", overridden(**options))
    check_one_error(log, words)


# -- good options ----------------------------------------------------------------------------------


def plan_of(host: EngineHost) -> dict[str, tuple[str, str]]:
    rows = host.call(status)["plan"]
    return {row["module"]: (row["scheme"], row["reason"]) for row in rows}


def updated_plan(host) -> dict[str, tuple[str, str]]:
    """The plan of an engine, after checking that an update of it equals a fresh start."""
    plan, fresh = plan_of(host), host.fresh("second")
    assert host.call_all(digests) != fresh.digests
    host.update_to("second")
    assert host.call_all(digests) == fresh.digests
    assert host.call(status)["plan"] == fresh.status[0]["plan"]
    assert plan_of(host) == plan
    return plan


def high_precision(plan: dict[str, tuple[str, str]]) -> set[str]:
    return {module for module, (scheme, _) in plan.items() if scheme == "high_precision"}


PATTERNS = ["model.layers.0.self_attn", r"re:.*layers\.1\.mlp\.(gate|up)_proj"]


@on(engine_key("qwen3", args=overridden(ignored_layers=PATTERNS), label="ignored"))
def test_ignored_layers_by_prefix_and_by_pattern_stay_in_high_precision(host):
    plan = updated_plan(host)
    assert high_precision(plan) == {
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.mlp.gate_up_proj",
    }
    assert PATTERNS[0] in plan["model.layers.0.self_attn.o_proj"][1]
    assert {scheme for scheme, _ in plan.values()} == {"high_precision", "blockwise"}


@runs_on("qwen3")
def test_sglangs_own_variable_for_ignored_layers_counts(checkpoint_dir):
    path = checkpoint(checkpoint_dir, MODELS["qwen3"], "first")
    ignored = "model.layers.0.mlp, model.layers.1.self_attn.o_proj"
    with EngineHost(path, env={"SGLANG_FP8_IGNORED_LAYERS": ignored}) as host:
        assert high_precision(plan_of(host)) == {
            "model.layers.0.mlp.gate_up_proj",
            "model.layers.0.mlp.down_proj",
            "model.layers.1.self_attn.o_proj",
        }


@on(engine_key("llama-misaligned", args=overridden(misaligned="bf16"), label="bf16"))
def test_misaligned_modules_may_stay_in_bf16(host, engine_pool):
    default = engine_pool.fresh(engine_key("llama-misaligned")).status[0]["plan"]
    plan = updated_plan(host)
    fallback = {row["module"] for row in default if row["scheme"] == "per_channel"}
    assert fallback
    assert high_precision(plan) == fallback
    assert not any(row["scheme"] == "high_precision" for row in default)
    assert all(reason for scheme, reason in plan.values() if scheme == "high_precision")
