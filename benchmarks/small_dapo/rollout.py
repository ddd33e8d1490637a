"""Rollouts and validation from a real SGLang server."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_server import RolloutServer

from sglang_fp8rl.lab.eval.server import Rollout

from .settings import Arm, Settings
from .task import EOS, MAX_RESPONSE_TOKENS, Problem, Task, is_correct, reward


@dataclass(frozen=True)
class Group:
    """A problem's sampled responses, and the rollout engine's log-probability of each token."""

    problem: Task
    responses: list[list[int]]
    logprobs: list[list[float]]

    @property
    def correct(self) -> list[bool]:
        return [is_correct(self.problem, response) for response in self.responses]

    @property
    def rewards(self) -> list[float]:
        return [reward(self.problem, response) for response in self.responses]


@dataclass(frozen=True)
class Validation:
    """The fraction answered exactly right, and a digest of all tokens and log-probabilities."""

    accuracy: float
    digest: str


def digest(answers: object) -> str:
    """Of nested lists of tokens and log-probabilities: equal digests are equal to the last bit."""
    return hashlib.sha256(repr(answers).encode()).hexdigest()[:16]


def grouped(problems: Sequence[Task], samples: int, answers: Sequence[Rollout]) -> list[Group]:
    """`samples` answers to each problem, one problem after the other."""
    groups = []
    for number, problem in enumerate(problems):
        own = answers[number * samples : (number + 1) * samples]
        groups.append(Group(problem, [a.output_ids for a in own], [a.logprobs for a in own]))
    return groups


class PolicyServer(RolloutServer):
    """The served policy; a context manager.

    Args:
        arm: decides the method and its options.
        checkpoint: the start's weights.
        seed, threads: as `RolloutServer`.
        log_path: takes the server's output.
    """

    def __init__(
        self,
        arm: Arm,
        settings: Settings,
        checkpoint: Path,
        seed: int,
        threads: int,
        log_path: Path,
    ) -> None:
        super().__init__(
            checkpoint,
            ["--disable-radix-cache", *arm.server_args],
            quantized=arm.quantized_server,
            options=arm.options,
            batch=max(settings.prompts * settings.samples, settings.validation),
            prefill=32768,
            seed=seed,
            threads=threads,
            log_path=log_path,
        )
        self._samples = settings.samples

    def sample(self, problems: Sequence[Problem]) -> list[Group]:
        """`samples` responses to each problem at temperature 1."""
        repeated = [problem.prompt for problem in problems for _ in range(self._samples)]
        answers = self.answers(repeated, MAX_RESPONSE_TOKENS, [EOS], 1.0)
        return grouped(problems, self._samples, answers)

    def validate(self, problems: Sequence[Problem]) -> Validation:
        """Answer problems greedily; draws no random number, so the rollouts stay what they are."""
        answers = self.answers([p.prompt for p in problems], MAX_RESPONSE_TOKENS, [EOS], 0.0)
        found = [(one.output_ids, one.logprobs) for one in answers]
        right = [is_correct(p, ids) for p, (ids, _) in zip(problems, found, strict=True)]
        return Validation(sum(right) / len(right), digest(found))
