"""The parts of `make verl` that need no trainer: what a run is held to, and why one never began."""

from __future__ import annotations

import pytest
from verl_trainer.check import KL, problems
from verl_trainer.failure import RAY_IS_UP, why_it_never_began
from verl_trainer.task import compute_score
from verl_trainer.trainer_run import Arm, RunResult

FP8, BF16 = Arm("fp8"), Arm("bf16", quantization=None)
WRONG = Arm("wrong-scale", wrong_scale=4.0)
WHOLE = {"consistent": True, "problems": [], "last_refit": {"outcome": "ok", "complete": True}}


def a_run(tmp_path, arm, kls, *, log="", **changes):
    path = tmp_path / "trainer.log"
    path.write_text(log)
    refits = [
        {"step": step, "status": WHOLE, "weight_version": str(step)} for step in range(len(kls))
    ]
    given = {
        "returncode": 0,
        "is_timeout": False,
        "seconds": 12.0,
        "refits": refits,
        "metrics": [{KL: one} for one in kls],
        "log": path,
        **changes,
    }
    return RunResult(arm, **given)


@pytest.mark.parametrize(
    ("arm", "kls", "is_right"),
    [
        (FP8, [1e-2, 2e-2], True),
        (FP8, [1e-2, 2e-1], False),
        (FP8, [1e-2, 1e-7], False),  # a policy that is certain has no gap to show
        (BF16, [5e-4, 5e-4], True),
        (BF16, [5e-4, 1e-2], False),
        (WRONG, [5e-1, 4e-1], True),
        (WRONG, [5e-2, 2e-2], False),
    ],
)
def test_a_right_run_is_inside_at_every_step_and_a_wrong_one_shows(tmp_path, arm, kls, is_right):
    assert (problems(a_run(tmp_path, arm, kls), len(kls)) == []) == is_right


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"returncode": 1}, "exit 1"),
        ({"is_timeout": True}, "not done after 12 s"),
        ({"metrics": [{KL: 1e-2}]}, "1 of 2 steps"),
        ({"refits": []}, "0 refits in 2 steps"),
        ({"metrics": [{}, {}]}, f"no {KL}"),
    ],
)
def test_a_run_that_did_not_end_well_is_told(tmp_path, changes, word):
    assert word in " ".join(problems(a_run(tmp_path, FP8, [1e-2, 1e-2], **changes), 2))


@pytest.mark.parametrize(
    ("status", "word"),
    [
        ("no answer", "no status"),
        ({**WHOLE, "consistent": False, "problems": ["old"]}, "not consistent"),
        ({**WHOLE, "last_refit": {"outcome": "failed", "complete": True}}, "failed"),
        ({**WHOLE, "last_refit": {"outcome": "ok", "complete": False}}, "False"),
    ],
)
def test_one_refit_that_was_not_whole_is_told(tmp_path, status, word):
    run = a_run(tmp_path, FP8, [1e-2, 1e-2])
    run.refits[1]["status"] = status
    (found,) = problems(run, 2)
    assert found.startswith("step 1: ")
    assert word in found


def test_weights_without_the_step_s_version_are_told(tmp_path):
    run = a_run(tmp_path, FP8, [1e-2])
    run.refits[0]["weight_version"] = "default"
    assert problems(run, 1) == ["step 0: weight_version 'default'"]


@pytest.mark.parametrize(
    ("log", "word"),
    [
        ("", "Ray did not come up"),
        ("ConnectionError: Could not find any running Ray instance", "ConnectionError: Could not"),
        (f"{RAY_IS_UP}\nValueError: no such option", "Ray was up"),
        (
            "UserWarning: not here: ModuleNotFoundError(\"No module named 'megatron'\")\n"
            "(HttpServer pid=8) AssertionError: no threads to bind\n"
            "ray.exceptions.RayTaskError(ActorDiedError): ray::run()\n"
            "ray.exceptions.ActorDiedError: causes include: (1) OOM killer",
            "first error: AssertionError: no threads to bind.",
        ),
    ],
)
def test_a_run_without_a_refit_says_why_and_what_to_do(tmp_path, log, word):
    said = why_it_never_began(a_run(tmp_path, FP8, [], log=log, returncode=1))
    assert word in said
    assert "exited with 1 after 12 s" in said
    assert str(tmp_path / "trainer.log") in said


@pytest.mark.parametrize(
    ("kind", "text", "score"), [("lower", "abcd", 1), ("upper", "aBcD", 0.5), ("lower", "", 0)]
)
def test_an_answer_is_worth_its_share_of_the_kind_asked_for(kind, text, score):
    assert compute_score("", text, kind) == score
