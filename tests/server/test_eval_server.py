"""`eval-aime` and `mismatch`, end to end on a real server with text and a chat template."""

import json

import pytest
from byte_tokenizer import save_tokenizer
from inspect_ai.log import list_eval_logs, read_eval_log
from support.engine.forked_server import ForkedServer
from typer.testing import CliRunner

from sglang_fp8rl.lab.cli import app
from sglang_fp8rl.lab.testing.checkpoints import make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("server")]

PROBLEMS = (
    ("What is 1 + 1?", "2"),
    ("Find the remainder when 7^2 is divided by 5.", "4"),
    ("How many primes are below 10?", "4"),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory = tmp_path_factory.mktemp("eval")
    checkpoint = make_checkpoint(directory / "qwen3", "qwen3")
    save_tokenizer(checkpoint)
    args = ("--quantization=fp8_blockwise_online",)
    log = directory / "server.log"
    server = ForkedServer(checkpoint, args, log_path=log)
    server.command.remove("--skip-tokenizer-init")  # requests carry text
    with server:
        yield server, checkpoint, directory


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)


def responses(out):
    """What was sampled: one uuid for each response that was ever asked for and kept."""
    logs = [read_eval_log(log) for log in list_eval_logs(str(out))]
    return sorted(
        (log.eval.model_base_url, s.id, s.epoch, s.uuid) for log in logs for s in log.samples
    )


def test_three_problems_are_sampled_graded_compared_and_not_sampled_twice(served):
    server, _, directory = served
    problems, out = directory / "problems.jsonl", directory / "logs"
    lines = [{"problem": text, "answer": answer} for text, answer in PROBLEMS]
    problems.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = (
        "eval-aime", "--url", server.url, "--url-baseline", f"http://localhost:{server.port}", "--problems", problems,
        "--n", 2, "--max-tokens", 24, "--out", out, "--json",
    )  # fmt: skip
    first = run(*command)
    assert first.exit_code == 0, first.output
    report = json.loads(first.stdout)
    samples = responses(out)
    again = run(*command)
    assert again.exit_code == 0, again.output
    assert responses(out) == samples
    assert json.loads(again.stdout) == report
    assert "within noise" in json.dumps(report)
    assert len(samples) == 2 * 2 * len(PROBLEMS)


def test_the_gap_to_the_transformers_model_is_that_of_fp8(served):
    server, checkpoint, directory = served
    prompts, plot = directory / "prompts.txt", directory / "gap.png"
    prompts.write_text("The lighthouse keeper\nA fair coin is tossed\n")
    command = ("mismatch", "--url", server.url, "--model", checkpoint, "--prompts", prompts)
    found = run(*command, "--max-new-tokens", 16, "--plot", plot, "--json")
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert plot.stat().st_size > 1000
    text = json.dumps(report)
    assert "k3" in text
    metrics = report.get("metrics", report)
    k3 = next(value for key, value in metrics.items() if "k3" in key)
    # Quantized weights and activations: not nothing, and far from another model's.
    assert 0 < k3 < 0.1, metrics
