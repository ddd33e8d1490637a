"""`sglang-fp8rl sensitivity` by the plans of SGLang's own models: its option keeps what it promises."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from rich.progress import Progress
from support.engine.forked import run_plan
from typer.testing import CliRunner

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.lab import plan_offline
from sglang_fp8rl.lab.cli import app
from sglang_fp8rl.lab.plan_offline import make_plan
from sglang_fp8rl.lab.testing.checkpoints import make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("plans_made_once", "one_thread")]

_SLOW = ("mixtral", "phi3", "qwen2_moe", "gemma3_text", "glm4_moe", "deepseek_v3")
FAMILIES = ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW)]


@pytest.fixture(scope="module")
def answers():
    return {}


@pytest.fixture
def plans_made_once(answers, monkeypatch):
    """Plans are made in forks, and one that was asked for before is not made again."""

    def run(args, env, log):
        path, wanted = Path(args[0]), (*args[1:], str(env))
        if wanted in answers:
            path.write_text(answers[wanted])
            return "exit status 0"
        outcome = run_plan(args, env, log)
        if path.exists():
            answers[wanted] = path.read_text()
        return outcome

    monkeypatch.setattr(plan_offline, "run_in_new_interpreter", run)


def invoke(*args):
    return CliRunner().invoke(app, ["sensitivity", *map(str, args)])


def schemes(model, **options):
    plan = make_plan(str(model), options=options)
    return {one.module: one.scheme for one in plan.modules.values()}


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [n, 3, 2 * n, 5]}) + "\n" for n in range(8)))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_the_option_leaves_out_what_was_chosen_and_nothing_else(tmp_path, prompts, family):
    model = make_checkpoint(tmp_path / "model", family)
    results, plot = tmp_path / "results.jsonl", tmp_path / "plot.png"
    args = [model, "--results", results, "--prompts", prompts, "--new-tokens", 0]
    said = invoke(*args, "--budget", "30%", "--plot", plot, "--json")
    assert said.exit_code == 0, said.stderr
    finding = json.loads(said.stdout)
    chosen = set(finding["choice"]["ignored_layers"])
    before, after = schemes(model), schemes(model, **finding["quantization_config"])
    assert chosen
    assert {name for name in before if before[name] != after[name]} == chosen
    assert {after[name] for name in chosen} == {"high_precision"}
    assert {row["module"] for row in finding["modules"]} == {
        name for name, scheme in before.items() if scheme != "high_precision"
    }
    assert all(row["kl"]["value"] > 0 for row in finding["modules"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    flag, value = shlex.split(finding["server_argument"])
    assert flag == "--json-model-override-args"
    assert json.loads(value)["quantization_config"] == finding["quantization_config"]


def test_the_command_says_how_it_ended(tmp_path, prompts, monkeypatch):
    model = make_checkpoint(tmp_path / "model", "llama", num_key_value_heads=1)
    results = tmp_path / "results.jsonl"
    args = [model, "--results", results, "--prompts", prompts, "--new-tokens", 2]
    small = invoke(*args, "--budget", "100")
    assert (small.exit_code, small.stdout) == (2, "")
    assert "the cheapest module" in small.stderr
    assert not results.exists()

    advance, steps = Progress.advance, []

    def interrupted(self, task, *more):
        steps.append(task)
        if len(steps) == 12:
            raise KeyboardInterrupt
        advance(self, task, *more)

    monkeypatch.setattr(Progress, "advance", interrupted)
    stopped = invoke(*args)
    assert stopped.exit_code == 130
    assert f"goes on from {results}" in stopped.stderr.replace("\n", "")
    kept = results.read_text()
    assert 0 < kept.count('"effect"') < 8
    done = invoke(*args)
    assert done.exit_code == 0, done.stderr
    assert results.read_text().startswith(kept)
    assert "per_channel" in done.stdout
    assert "Serve with:\n--json-model-override-args" in done.stdout

    other = invoke(*args, "--options", '{"granularity": "per_channel"}')
    assert other.exit_code == 2
    assert "measurements of two runs don't mix" in other.stderr

    # A file in which the choice brought nothing.
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    everything = next(row["kl"] for row in rows if row["row"] == "set" and not row["exempt"])
    for row in rows:
        if row["row"] == "set":
            row["kl"] = everything
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    broken = invoke(*args)
    assert broken.exit_code == 1
    assert "DOES NOT HOLD" in broken.stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--options", "{"), "it has to be JSON"),
        (("--options", "[]"), "JSON object"),
        (("--dtype", "float8"), "float32 or bfloat16"),
        (("--plot", "a.gif"), "a name that ends in"),
        (("--options", '{"ignored_layers": ["re:.*"]}'), "no module is served in FP8"),
    ],
)
def test_bad_input_ends_with_status_two(dense_checkpoint, tmp_path, more, message):
    said = invoke(dense_checkpoint, "--results", tmp_path / "r.jsonl", *more)
    assert said.exit_code == 2, said.output
    assert message in said.stderr


@pytest.mark.slow
def test_a_server_with_the_option_serves_the_choice_in_high_precision(tmp_path, server):
    model = make_checkpoint(tmp_path / "model", "qwen3")
    said = invoke(model, "--results", tmp_path / "r.jsonl", "--new-tokens", 0, "--json")
    finding = json.loads(said.stdout)
    argument = shlex.split(finding["server_argument"])
    running = server(model, "--quantization=fp8_blockwise_online", *argument)
    served = RefitClient(running.url).status()["plan"]
    chosen = set(finding["choice"]["ignored_layers"])
    assert chosen
    assert {row["module"] for row in served if row["scheme"] == "high_precision"} == chosen
