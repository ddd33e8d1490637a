"""Rollouts and validation from a real SGLang server: token ids in, token ids and logprobs out.

One HTTP request holds a whole batch. SGLang hands such a batch to its scheduler as one message, so
what is computed together, and so every random draw, depends on the requests and the server's seed
only: the same weights give the same rollouts, token for token and bit for bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_fp8rl.lab.testing.server import ServerProcess

from .settings import QUANTIZATION, Arm, Settings
from .task import EOS, MAX_RESPONSE_TOKENS, Problem, Task, is_correct, reward

_TIMEOUT = 300.0


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


class RolloutServer:
    """The served policy; a context manager.

    Args:
        arm: decides the method and its options.
        checkpoint: the start's weights.
        seed: of the server's sampling.
        threads: of the server's matrix products.
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
        batch = max(settings.prompts * settings.samples, settings.validation)
        args = [
            f"--random-seed={seed}",
            "--disable-radix-cache",
            f"--max-running-requests={batch}",
            "--max-total-tokens=32768",
            "--mem-fraction-static=0.5",  # or SGLang derives a negative one from the next two
            "--chunked-prefill-size=32768",
            "--max-prefill-tokens=32768",
            "--log-level=warning",
            *arm.server_args,
        ]
        if arm.quantized_server:
            args.append(f"--quantization={QUANTIZATION}")
        if arm.options:
            override = {"quantization_config": dict(arm.options)}
            args.append(f"--json-model-override-args={json.dumps(override)}")
        self.process = ServerProcess(
            checkpoint,
            args,
            log_path=log_path,
            env={"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
        )
        self._samples = settings.samples

    def __enter__(self) -> RolloutServer:
        self.process.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.process.__exit__(*error)

    def sample(self, problems: Sequence[Problem]) -> list[Group]:
        """`samples` responses to each problem at temperature 1."""
        repeated = [problem for problem in problems for _ in range(self._samples)]
        answers = self._generate([p.prompt for p in repeated], temperature=1.0)
        groups = []
        for number, problem in enumerate(problems):
            own = answers[number * self._samples : (number + 1) * self._samples]
            groups.append(Group(problem, [ids for ids, _ in own], [values for _, values in own]))
        return groups

    def validate(self, problems: Sequence[Problem]) -> Validation:
        """Answer problems greedily; draws no random number, so the rollouts stay what they are."""
        answers = self._generate([p.prompt for p in problems], temperature=0.0)
        right = [is_correct(p, ids) for p, (ids, _) in zip(problems, answers, strict=True)]
        return Validation(sum(right) / len(right), digest(answers))

    def _generate(
        self, prompts: list[list[int]], temperature: float
    ) -> list[tuple[list[int], list[float]]]:
        answers = self.process.post(
            "/generate",
            {
                "input_ids": prompts,
                "sampling_params": {
                    "max_new_tokens": MAX_RESPONSE_TOKENS,
                    "temperature": temperature,
                    "stop_token_ids": [EOS],
                },
                "return_logprob": True,
            },
            timeout=_TIMEOUT,
        )
        pairs = [answer["meta_info"]["output_token_logprobs"] for answer in answers]
        return [([p[1] for p in one], [p[0] for p in one]) for one in pairs]
