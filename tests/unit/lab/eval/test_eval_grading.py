"""Grading: what counts as an answer, and that no response can stop the grader."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

import pytest

from sglang_fp8rl.errors import EvaluationError
from sglang_fp8rl.lab.eval.grading import Grader, final_answer


@pytest.fixture(scope="module")
def grader():
    with Grader() as found:
        yield found


@pytest.mark.parametrize(
    ("reference", "response", "status"),
    [
        ("204", "so it is \\boxed{204}.", "correct"),
        ("033", "so it is \\boxed{33}.", "correct"),
        ("33", "so it is \\boxed{033}.", "correct"),
        ("204", "\\boxed{m+n=204}", "correct"),
        ("204", "\\boxed{204^\\circ}", "correct"),
        ("204", "\\fbox{204}", "correct"),
        ("204", "\\boxed{204\\%}", "correct"),
        ("204", "\\boxed{204 %}", "correct"),
        ("204", "\\boxed{204.}", "correct"),
        ("204", "\\boxed{204 \\pmod{1000}}", "correct"),
        ("204", "\\boxed{204 \\bmod 1000}", "correct"),
        ("204", "\\boxed{n \\equiv 204 \\pmod{1000}}", "correct"),
        ("204", "\\boxed{205 \\pmod{1000}}", "wrong"),
        ("204", "\\boxed{1000 \\pmod{204}}", "wrong"),
        ("204", "\\boxed{20.4\\%}", "wrong"),
        ("1000", "\\boxed{1,000}", "correct"),
        ("\\frac{3}{4}", "\\boxed{0.75}", "correct"),
        ("204", "Answer: $204$", "correct"),
        ("204", "The answer is 204.", "correct"),
        ("204", "The answer is **204**.", "correct"),
        ("204", "**Answer: 204**", "correct"),
        ("204", "**Final Answer:** **204**", "correct"),
        ("1024", "Answer: 2**10", "correct"),
        ("204", "\\boxed{5} at first, but no: \\boxed{204}", "correct"),
        ("5204", "\\boxed{5} and then \\boxed{204}", "wrong"),  # Math-Verify alone joins them
        ("204", "\\boxed{204} at first, but no: \\boxed{5}", "wrong"),
        ("204", "<think>\\boxed{204}</think> It is \\boxed{7}.", "wrong"),
        ("204", "\\boxed{203.9999999999}", "wrong"),
        ("204", "\\boxed{1, 2, 204}", "wrong"),
        ("1204", "I don't know. x=1 204", "no_answer"),  # read without anchors: 1204
        ("204", "so m+n = 204", "no_answer"),
        ("204", "<think>\\boxed{204}</think>", "no_answer"),
        ("204", "It is \\boxed{204", "no_answer"),  # cut off at the token limit
        ("204", "\\boxed{}", "no_answer"),
        ("204", "", "no_answer"),
        ("204", "\\boxed{" * 3000, "no_answer"),
        ("204", "long " * 50_000 + "\\boxed{204}", "correct"),
        ("204", "\x00\ud800 \\boxed{204}", "correct"),
    ],
)
def test_verdicts(grader, reference, response, status):
    assert grader.grade(reference, response).status == status


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("a \\boxed{1} b \\boxed{\\frac{2}{3}} c", "\\boxed{\\frac{2}{3}}"),
        ("\\boxed {7}", "\\boxed{7}"),
        ("\\boxed{\\{1, 2\\}}", "\\boxed{\\{1, 2\\}}"),
        ("\\boxed{\\{1}", "\\boxed{\\{1}"),
        ("\\boxed{1", ""),
        ("no box", "no box"),
    ],
)
def test_the_last_box_is_taken_with_its_braces(response, answer):
    assert final_answer(response) == answer


def test_an_endless_answer_is_killed_and_grading_goes_on():
    with Grader(deadline=3.0, workers=1) as grader:
        assert grader.grade("1", "\\boxed{1}").status == "correct"  # the process is up
        assert grader.grade("9", "\\boxed{2003^{2002^{2001}}}").status == "timeout"
        assert grader.grade("9", "\\boxed{9}").status == "correct"


def test_a_dead_verifier_is_an_error_and_not_a_wrong_answer():
    before = set(multiprocessing.active_children())
    with Grader(deadline=60.0, workers=1) as grader:
        grader.grade("1", "\\boxed{1}")
        [child] = set(multiprocessing.active_children()) - before
        killer = threading.Timer(0.5, os.kill, (child.pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(EvaluationError, match="ended with status -9"):
            grader.grade("1", "\\boxed{2003^{2002^{2001}}}")
    assert not child.is_alive()


def test_a_reference_that_cannot_be_read_is_refused(grader):
    grader.check_reference("problem '1'", "204")
    with pytest.raises(EvaluationError, match=r"problem '2': answer '\\\\frac\{1'"):
        grader.check_reference("problem '2'", "\\frac{1")


@pytest.mark.parametrize(
    "reference", ["24 + 48 = <<24+48=72>>72.\n#### 72", "#### 72", "72.", "50%"]
)
def test_a_reference_that_only_its_own_letters_equal_is_refused(grader, reference):
    with pytest.raises(EvaluationError, match="so every response would be wrong"):
        grader.check_reference("problem '1'", reference)


@pytest.mark.parametrize(
    "reference",
    ["025", "1,000", "\\frac{1}{2}", "$3\\pi$", "(1, 2)", "x<3", "\\text{(A)}", "90^\\circ"],
)
def test_a_reference_that_can_be_read_is_taken(grader, reference):
    grader.check_reference("problem '1'", reference)


def test_a_missing_verifier_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EvaluationError, match=r"sglang-fp8rl\[lab\]"):
        Grader()
