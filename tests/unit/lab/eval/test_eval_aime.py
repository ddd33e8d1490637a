"""The whole evaluation against a server of known accuracy."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from inspect_ai.log import list_eval_logs, read_eval_log, write_eval_log
from support.eval.eval_server import FakeServer
from typer.testing import CliRunner

from sglang_fp8rl.errors import ConfigError, EvaluationError
from sglang_fp8rl.lab.cli import app
from sglang_fp8rl.lab.eval import aime
from sglang_fp8rl.lab.eval.aime import run_eval
from sglang_fp8rl.lab.eval.grading import Grader
from sglang_fp8rl.lab.eval.options import EvalOptions
from sglang_fp8rl.lab.eval.problems import load_problems
from sglang_fp8rl.lab.eval.report import print_report
from sglang_fp8rl.lab.terminal import console

ANSWERS = {"one": 204, "two": 33, "three": 902}
LEFTOVER = re.compile(r"statement (\w+)")


def right_in(shares):
    """A model that answers problem `name` correctly `shares[name]` times, then wrongly."""

    def model(prompt, times):
        name = LEFTOVER.search(prompt)[1]
        good = times < shares[name]
        return f"Thus \\boxed{{{ANSWERS[name] if good else 999}}}."

    return model


PERFECT, MIXED, POOR = (
    dict(zip(ANSWERS, shares, strict=True)) for shares in ((99, 99, 99), (8, 4, 0), (1, 0, 0))
)


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    rows = [{"id": k, "problem": f"statement {k}", "answer": v} for k, v in ANSWERS.items()]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture(scope="module")
def run():
    """`run_eval` with one grader for all tests: starting one takes seconds."""
    with Grader(workers=1) as grader:
        yield functools.partial(run_eval, grader=grader)


def options(server, problems, **changes):
    given = {
        "url": server.url,
        "problems": str(problems),
        "out": problems.parent / "logs",
        "samples": 8,
        "retries": 1,
    }
    return EvalOptions(**given | changes)


def test_scores_are_those_of_the_model(problems, run):
    with FakeServer(right_in(MIXED)) as server:
        report = run(options(server, problems))
    arm = report.candidate
    assert arm.correct == {"one": 8, "two": 4, "three": 0}
    assert arm.avg_at_n.value == pytest.approx(0.5)
    assert arm.pass_at_k[1].value == pytest.approx(0.5)
    assert arm.pass_at_k[8].value == pytest.approx(2 / 3)
    assert list(arm.pass_at_k) == [1, 2, 4, 8]
    assert (arm.truncated, arm.no_answer, arm.mean_tokens) == (0, 0, 11)
    assert (report.baseline, report.comparison) == (None, None)
    assert server.bodies[0]["messages"][0]["content"].endswith("within \\boxed{}.")


def test_a_worse_candidate_is_told_and_swapped_is_better(problems, run):
    with FakeServer(right_in(POOR)) as poor, FakeServer(right_in(PERFECT)) as good:
        worse = run(options(poor, problems, baseline_url=good.url))
        asked = len(good.bodies)
        better = run(options(good, problems, baseline_url=poor.url))
        assert len(good.bodies) == asked, "the second run found all samples in the file"
    assert (worse.comparison.verdict, better.comparison.verdict) == ("worse", "better")
    assert worse.comparison.difference.value == pytest.approx(1 / 24 - 1)


def test_more_samples_can_be_asked_for_later(problems, run):
    with FakeServer(right_in(PERFECT)) as server:
        run(options(server, problems, samples=2))
        more = run(options(server, problems, samples=5))
        assert len(server.bodies) == 15
        assert more.candidate.correct == dict.fromkeys(ANSWERS, 5)
        run(options(server, problems, samples=5))
    assert len(server.bodies) == 15


def test_a_failing_server_keeps_what_was_sampled(problems, run):
    with FakeServer(right_in(PERFECT)) as server:
        given = options(server, problems, concurrency=1)
        answer = server.model

        def fails_after_ten(prompt, times):
            if server.asked.total() > 10:
                server.faults = [(400, {"error": {"message": "out of memory"}})] * 9
            return answer(prompt, times)

        server.model = fails_after_ten
        with pytest.raises(EvaluationError, match="out of memory"):
            run(given)
        kept = server.asked.total()
        assert kept >= 10
        server.model, server.faults = answer, []
        server.bodies.clear()
        assert run(given).candidate.avg_at_n.value == 1
        assert len(server.bodies) == 24 - kept


def test_a_resumed_run_that_copied_little_before_it_was_interrupted_costs_no_sample(problems, run):
    with FakeServer(right_in(PERFECT)) as server:
        given = options(server, problems, concurrency=1, samples=4)
        run(given)
        server.bodies.clear()
        [whole] = list_eval_logs(str(given.out))
        log = read_eval_log(whole)
        log.status, log.samples = "cancelled", log.samples[:10]
        write_eval_log(log, whole)
        log.samples = log.samples[:2]  # the newer one, as Ctrl-C leaves it
        write_eval_log(log, whole.name.replace("logs/", "logs/9"))
        assert run(given).candidate.avg_at_n.value == 1
    assert len(server.bodies) == 12 - 10


def test_samples_beyond_those_asked_for_make_no_log_the_fuller_one(problems, run):
    with FakeServer(right_in(PERFECT)) as server:
        run(options(server, problems))
        [whole] = list_eval_logs(str(options(server, problems).out))
        log = read_eval_log(whole)
        few = options(server, problems, samples=4)
        complete = run(few)
        log.status = "started"  # as a killed run leaves it; Inspect never deletes it
        log.samples = [one for one in log.samples if (one.id, one.epoch) != ("one", 1)]
        write_eval_log(log, whole)
        os.utime(whole.name.removeprefix("file://"), (0, 0))
        server.bodies.clear()
        assert run(few) == complete
    assert not server.bodies


def test_a_passing_failure_is_tried_again_and_no_sample_is_lost(problems, run):
    with FakeServer(right_in(PERFECT)) as server:
        server.faults = [(503, {"error": {"message": "busy"}})]
        assert run(options(server, problems, samples=1)).candidate.avg_at_n.value == 1
    assert len(server.bodies) == 4


def test_samples_of_a_problem_have_seeds_of_their_own(problems, run):
    """A deterministic server takes one seed for all requests that have none: n times one answer."""
    with FakeServer(right_in(PERFECT)) as server:
        run(options(server, problems, samples=2))
        run(options(server, problems, samples=4))
    seeds = {}
    for body in server.bodies:
        seeds.setdefault(body["messages"][0]["content"], []).append(body["seed"])
    assert [sorted(found) for found in seeds.values()] == [[1, 2, 3, 4]] * 3


def test_a_served_name_in_brackets_is_shown(problems, run):
    with FakeServer(right_in(PERFECT)) as server:
        report = run(options(server, problems, samples=1))
    named = replace(report.candidate, served={"model": "tiny[fp8]"})
    shown = console()
    with shown.capture() as text:
        print_report(replace(report, candidate=named, confidence=0.995), shown)
    assert "tiny[fp8]" in text.get()
    assert "99.5%" in text.get()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.json", '{"problem": "a", "answer": 1}\n' * 2, r"a \.jsonl file"),
        ("p.json", "[1, 2]", r"a \.jsonl file"),
        ("p.jsonl", '{"problem": "a", "answer": 0.5}', "an integer, or LaTeX as text"),
    ],
)
def test_problems_that_can_t_be_read_are_told_what_can(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(EvaluationError, match=message):
        load_problems(str(path), "train", "{problem}")


def test_an_aborted_response_is_no_sample(problems, run):
    with FakeServer(right_in(PERFECT)) as server:
        server.finish_reason = "abort"
        with pytest.raises(EvaluationError, match="no sample"):
            run(options(server, problems, samples=1))


def test_a_restarted_server_in_another_precision_is_not_averaged_in(problems, run):
    with FakeServer(right_in(PERFECT)) as server:
        run(options(server, problems, samples=1))
        server.identity = server.identity | {"quantization": None}
        with pytest.raises(EvaluationError, match=r"'quantization': 'fp8'.*, is "):
            run(options(server, problems))


def test_a_damaged_log_is_named_and_nothing_is_asked(problems, run):
    with FakeServer(right_in(PERFECT)) as server:
        run(options(server, problems, samples=1))
        [log] = (problems.parent / "logs").glob("*.eval")
        log.write_bytes(log.read_bytes()[:100])
        with pytest.raises(EvaluationError, match=rf"^{re.escape(str(log))}: .*has to be whole"):
            run(options(server, problems))
    assert len(server.bodies) == 3


def test_a_disk_without_room_is_no_fault_of_the_server(problems, run, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Grader, "check_reference", lambda *_: None)
    monkeypatch.setattr(Grader, "grade", full)
    told = pytest.raises(EvaluationError, match=r"No space left.* room to write")
    with FakeServer(right_in(PERFECT)) as server, told:
        run(options(server, problems, samples=1))


def test_requests_run_at_the_same_time_within_the_limit(problems, run):
    with FakeServer(right_in(PERFECT)) as server:
        run(options(server, problems, samples=16, concurrency=4))
    assert 2 <= server.most_in_flight <= 4


def test_nothing_is_sent_for_bad_problems_or_an_unreachable_baseline(problems, run):
    with FakeServer(right_in(PERFECT)) as gone:
        url = gone.url
    with FakeServer(right_in(PERFECT)) as server:
        with pytest.raises(EvaluationError, match=url):
            run(options(server, problems, baseline_url=url))
        problems.write_text(problems.read_text() + '\n{"id": "four", "pro')
        with pytest.raises(EvaluationError, match=r"problems.jsonl.*after 3 rows"):
            run(options(server, problems))
        assert server.bodies == []


def test_truncated_and_missing_answers_are_counted(problems, run):
    with FakeServer(lambda prompt, times: "I think that") as server:
        server.finish_reason = "length"
        arm = run(options(server, problems, samples=1)).candidate
    assert (arm.truncated, arm.no_answer, arm.avg_at_n.value) == (1, 1, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "--n: 0"),
        ({"temperature": 0.0}, "--n: 16; .* the same answer"),
        ({"temperature": float("inf")}, "--temperature: inf"),
        ({"timeout": float("inf")}, "--timeout: inf; .*finite, at least 1 second"),
        ({"concurrency": 0}, "--concurrency: 0"),
        ({"alpha": 1.0}, "--alpha"),
        ({"top_p": 0.0}, "--top-p: 0.0"),
        ({"max_tokens": 0}, "--max-tokens: 0"),
        ({"url": "nowhere"}, "--url: nowhere"),
        ({"baseline_url": "http://h:1/v1/"}, "--url-baseline"),
        ({"out": Path(__file__)}, "--out: .*a folder that can be written"),
        ({"out": Path(__file__, "below", "it")}, "--out"),
        ({"template": "no place"}, "--template"),
        ({"template": "{problem} \\boxed{}"}, "every other brace twice"),
    ],
)
def test_bad_options_are_named(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        EvalOptions(**{"url": "http://h:1", "problems": "p", "out": tmp_path / "o"} | changes)


def invoke(*args, **options):
    return CliRunner().invoke(app, ["eval-aime", *map(str, args)], **options)


def test_command_reports_json_and_status(problems):
    common = ["--problems", problems, "--n", 8, "--json", "--out", problems.parent / "logs"]
    with FakeServer(right_in(POOR)) as poor, FakeServer(right_in(PERFECT)) as good:
        worse = invoke("--url", poor.url, "--url-baseline", good.url, *common)
        better = invoke("--url", good.url, "--url-baseline", poor.url, *common)
        table = invoke("--url", good.url, "--url-baseline", poor.url, *common[:4], *common[5:])
    assert (worse.exit_code, better.exit_code, table.exit_code) == (1, 0, 0)
    report = json.loads(worse.stdout)
    assert report["comparison"]["verdict"] == "worse"
    assert report["candidate"]["correct"] == POOR
    assert "Verdict: better" in table.stdout
    assert "exact permutation" in table.stdout


def test_command_ends_with_status_two_on_bad_input(problems):
    with FakeServer(str) as server:
        url = server.url
    result = invoke("--url", url, "--problems", problems, "--out", problems.parent / "logs")
    assert result.exit_code == 2
    assert "did not answer" in result.stderr
    assert result.stdout == ""
    assert not (problems.parent / "logs").exists()
    missing = invoke("--url", url, "--problems", "missing.jsonl")
    assert missing.exit_code == 2
    assert "Check the path" in missing.stderr


def test_ctrl_c_ends_at_once_and_keeps_what_was_sampled(problems):
    out = problems.parent / "logs"
    # A runner in the background may have started us with SIGINT ignored, which children inherit.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import typer; from sglang_fp8rl.lab.eval.aime import eval_aime; typer.run(eval_aime)"
    )
    with FakeServer(right_in(PERFECT)) as server:
        answer, release = server.model, server.delay

        def stuck_after_five(prompt, times):
            if server.asked.total() > 5:
                release.wait(300)
            return answer(prompt, times)

        server.model = stuck_after_five
        args = ["--url", server.url, "--problems", problems, "--out", out, "--n", "8"]
        child = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, args), "--concurrency", "1"],
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        deadline = time.monotonic() + 300
        while len(server.bodies) < 6 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(child.pid, signal.SIGINT)
        _, told = child.communicate(timeout=60)
        release.set()
    assert child.returncode == 130
    assert b"the same command resumes" in told
    [log] = list_eval_logs(str(out))
    assert len(read_eval_log(log).samples) == 5


@pytest.mark.parametrize("name", ["SGLANG_API_KEY", "OPENAI_API_KEY"])
def test_the_key_is_read_from_either_variable(monkeypatch, name):
    taken = []

    def take(options):
        taken.append(options.api_key)
        raise ConfigError("a", "b", "c", "d")

    monkeypatch.setattr(aime, "run_eval", take)
    for other in ("SGLANG_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(other, raising=False)
    invoke("--url", "http://h:1", "--problems", "p", env={name: "a key"})
    assert taken == ["a key"]
