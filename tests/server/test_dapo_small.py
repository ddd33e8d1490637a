"""The small DAPO benchmark, a few steps of it: rollouts repeat, and a wrong scale turns its check red."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_dapo.check import BASELINE, CHECKED, check, load_bounds
from small_dapo.settings import ARMS, Settings

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("one_thread"),
]

ACCURACY = Path(__file__).parents[2] / "benchmarks" / "accuracy"
STEPS = 2
SETTINGS = Settings(
    prompts=16, samples=4, train_prompts=4, max_generations=1, validation=16, start_accuracy=0.01
)
BOUNDS = replace(load_bounds(ACCURACY / "bounds.json"), accuracy_band=1.0, steps=STEPS, seeds=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`run(fault)`: the records of so many steps of FP8 blockwise on one seed."""
    from small_dapo.loop import Run, run_steps
    from small_dapo.start import supervised_start

    work = tmp_path_factory.mktemp("dapo")
    start = supervised_start(SETTINGS, 0, work)

    def records(name, fault=None):
        one = Run(ARMS[CHECKED], SETTINGS, 0, STEPS, start, work / name, fault=fault)
        return list(run_steps(one))

    return records


@pytest.mark.slow
def test_a_healthy_run_is_green_and_a_wrong_scale_is_red(run):
    healthy, faulty = run("healthy"), run("faulty", "scale")
    assert [record["step"] for record in healthy] == list(range(STEPS + 1))
    for records, green in ((healthy, True), (faulty, False)):
        findings = check({(BASELINE, 0): healthy, (CHECKED, 0): records}, BOUNDS)
        assert findings[1].ok is green, findings[1]


def test_an_update_makes_rewarded_responses_likelier_than_others():
    import torch
    from small_dapo.dapo import Dapo
    from small_dapo.model import Policy
    from small_dapo.rollout import Group
    from small_dapo.task import EOS, Problem

    problems = [Problem((3, 1, 2, 0, 5)), Problem((9, 8, 1, 1, 7, 2))]
    policy = Policy.random(SETTINGS, seed=1)
    groups = []
    for problem in problems:
        responses = [problem.answer, [*problem.answer[:-2], EOS], [EOS], problem.answer]
        with torch.no_grad():
            logprobs, mask = policy.logprobs([problem.prompt] * 4, responses)
        rows = [row[kept.bool()].tolist() for row, kept in zip(logprobs, mask, strict=True)]
        groups.append(Group(problem, responses, rows))

    def likelihoods(right: bool) -> float:
        pairs = [
            (group.problem.prompt, response)
            for group in groups
            for response, hit in zip(group.responses, group.correct, strict=True)
            if hit is right
        ]
        with torch.no_grad():
            return policy.logprobs(*zip(*pairs, strict=True))[0].sum().item()

    before = likelihoods(True) - likelihoods(False)
    figures = Dapo(policy, SETTINGS).update(groups)
    assert figures.tis_capped == 0.0
    assert likelihoods(True) - likelihoods(False) > before


def test_weights_above_the_cap_are_counted():
    import torch
    from small_dapo.dapo import Dapo
    from small_dapo.model import Policy
    from small_dapo.rollout import Group
    from small_dapo.task import EOS, Problem

    problem = Problem((3, 1, 2, 0, 5))
    responses = [problem.answer, [EOS]]
    policy = Policy.random(SETTINGS, seed=1)
    with torch.no_grad():
        logprobs, _ = policy.logprobs([problem.prompt] * 2, responses)
    rows = [logprobs[0, : len(problem.answer)].tolist(), logprobs[1, :1].tolist()]
    rows[0][0] -= 5.0  # the rollout engine thought this token far less likely
    figures = Dapo(policy, SETTINGS).update([Group(problem, responses, rows)])
    assert figures.tis_capped == pytest.approx(1 / 7)
