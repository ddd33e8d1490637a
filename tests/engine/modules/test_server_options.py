"""Options: good ones decide the schemes at start and at every update, wrong ones stop the server."""

from __future__ import annotations

import _options
import engine_host
import pytest
from _options import log_of_a_failed_start, overridden
from _served import QUANTIZED
from commands import digests, status, update
from engine_host import EngineHost
from models import MODELS, checkpoint

from sglang_fp8rl.errors import HostError
from sglang_fp8rl.testing.server import ServerProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


# -- wrong options ---------------------------------------------------------------------------------


def error_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if "sglang_fp8rl.errors." in line]


def test_an_unknown_key_stops_the_server_with_one_clear_line(checkpoint_dir, tmp_path):
    """A real server, to its end."""
    path = checkpoint(checkpoint_dir, MODELS["qwen3"], "first")
    args = (QUANTIZED, *overridden(misalign="bf16"))
    log = tmp_path / "server.log"
    with pytest.raises(HostError, match="before it was healthy"):
        ServerProcess(path, args, log_path=log).start()
    lines = set(error_lines(log.read_text(errors="replace")))
    assert len(lines) == 1, lines
    line = lines.pop()
    for word in ("'misalign'", "known keys are weight_block_size, ", "Did you mean 'misaligned'?"):
        assert word in line, (word, line)


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
            ["qkv_proj", "['k_proj']", "one scheme", "Ignore all of"],
        ),
        (
            "llama-misaligned",
            {"misaligned": "error"},
            ["model.layers.0.self_attn.qkv_proj", "128", "misaligned"],
        ),
    ],
    ids=["block-size", "pattern-without-module", "part-of-a-fused-module", "misaligned-error"],
)
def test_wrong_options_stop_the_scheduler_with_one_clear_line(
    checkpoint_dir, tmp_path, model, options, words
):
    path = checkpoint(checkpoint_dir, MODELS[model], "first")
    log = log_of_a_failed_start(path, tmp_path / "scheduler.log", overridden(**options))
    lines = set(error_lines(log))
    assert len(lines) == 1, log[-4000:]
    line = lines.pop()
    for word in words:
        assert word in line, (word, line)


# -- good options ----------------------------------------------------------------------------------


def plan_of(host: EngineHost) -> dict[str, tuple[str, str]]:
    return {entry["module"]: (entry["scheme"], entry["reason"]) for entry in plan_entries(host)}


def plan_entries(host: EngineHost) -> list[dict[str, str]]:
    return host.call(status)["plan"]


def served_schemes(checkpoint_dir, name, args=()) -> dict[str, tuple[str, str]]:
    """The plan of an engine, after checking that an update of it equals a fresh start."""
    model = MODELS[name]
    with EngineHost(checkpoint(checkpoint_dir, model, "second"), args=args) as fresh:
        expected, plan = fresh.call(digests), plan_of(fresh)
    with EngineHost(checkpoint(checkpoint_dir, model, "first"), args=args) as host:
        assert host.call(digests) != expected
        assert host.call(update, list(model.second.items()))[0]
        assert host.call(digests) == expected
        assert plan_of(host) == plan
        assert host.call(status)["consistent"]
    return plan


def high_precision(plan: dict[str, tuple[str, str]]) -> set[str]:
    return {module for module, (scheme, _) in plan.items() if scheme == "high_precision"}


def test_ignored_layers_by_prefix_and_by_pattern_stay_in_high_precision(checkpoint_dir):
    patterns = ["model.layers.0.self_attn", r"re:.*layers\.1\.mlp\.(gate|up)_proj"]
    plan = served_schemes(checkpoint_dir, "qwen3", overridden(ignored_layers=patterns))
    assert high_precision(plan) == {
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.mlp.gate_up_proj",
    }
    assert patterns[0] in plan["model.layers.0.self_attn.o_proj"][1]
    assert {scheme for scheme, _ in plan.values()} == {"high_precision", "blockwise"}


def test_sglangs_own_variable_for_ignored_layers_counts(checkpoint_dir, monkeypatch):
    monkeypatch.setattr(engine_host, "_run_rank", _options.run_rank_with_ignored_layers)
    plan = served_schemes(checkpoint_dir, "qwen3")
    assert high_precision(plan) == {
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.o_proj",
    }


def test_misaligned_modules_may_stay_in_bf16(checkpoint_dir):
    default = served_schemes(checkpoint_dir, "llama-misaligned")
    plan = served_schemes(checkpoint_dir, "llama-misaligned", overridden(misaligned="bf16"))
    fallback = {module for module, (scheme, _) in default.items() if scheme == "per_channel"}
    assert fallback
    assert high_precision(plan) == fallback
    assert not high_precision(default)
    assert all(reason for scheme, reason in plan.values() if scheme == "high_precision")
