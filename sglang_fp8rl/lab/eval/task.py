"""The Inspect task: every problem n times to a running server, graded; its log is what resumes.

Inspect does the sampling, the retries of requests and the log. What is here is who is asked, how a
response is graded, and that one log never mixes two settings. Imports `inspect_ai`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inspect_ai import Task, eval_set
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import EvalLog, list_eval_logs, read_eval_log
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver

from .grading import Grader
from .problems import digest
from .results import SCORER, ResultsError
from .server import ServerError


@dataclass(frozen=True)
class Sampling:
    """How each response is sampled. What is not named here is left to the server's defaults."""

    temperature: float
    top_p: float
    max_tokens: int


@dataclass(frozen=True)
class Arm:
    """One server: its URL and what it says that it serves."""

    url: str
    served: dict[str, Any]


@dataclass(frozen=True)
class Requests:
    """How requests are sent; nothing of this changes what is measured.

    Attributes:
        concurrency: requests in flight, over all servers.
        timeout: seconds for one response.
        retries: attempts of a request that fails for a passing reason.
    """

    concurrency: int
    timeout: float
    retries: int
    api_key: str | None


def take_samples(
    arms: Sequence[Arm],
    problems: Sequence[Sample],
    samples: int,
    sampling: Sampling,
    requests: Requests,
    out: Path,
    grader: Grader,
) -> dict[str, EvalLog]:
    """Fill the logs in `out` up to `samples` responses of each problem from each arm.

    What is there already is kept. Progress goes to stderr.

    Returns:
        The full log of each arm, by URL.

    Raises:
        ServerError: a request fails for good; what was taken until then is in `out`.
        ResultsError: `out` has samples of this URL under other settings.
        KeyboardInterrupt: as it says; what was taken is in `out`.
    """
    settings = {**asdict(sampling), "problems": digest(problems)}
    tasks = []
    for arm in arms:
        wanted = {"url": arm.url, **settings, "served": arm.served}
        _check_same_settings(out, wanted)
        tasks.append(_task(arm, problems, sampling, requests.api_key, wanted, grader))
    with contextlib.redirect_stdout(sys.stderr):  # Inspect's display, whatever it is
        _, headers = eval_set(
            tasks,
            log_dir=str(out),
            log_dir_allow_dirty=True,
            retry_attempts=1,  # requests are retried; whether a whole run is, the user decides
            epochs=samples,
            display="rich" if sys.stderr.isatty() else "plain",
            max_connections=requests.concurrency,
            max_samples=requests.concurrency,
            max_retries=requests.retries,
            attempt_timeout=max(1, round(requests.timeout)),
            log_buffer=1,  # a sample may take minutes: each is written as it comes
        )
    logs = {log.eval.metadata["url"]: log for log in headers if log.eval.metadata}
    for url, log in logs.items():
        if log.status != "success":
            raise ServerError(
                url,
                log.error.message if log.error else f"the run ended as {log.status}",
                "every request is answered",
                "Check the server; a prompt and --max-tokens must fit its context. Samples are "
                f"kept in {out}, the same command resumes.",
            )
    return {url: read_eval_log(log.location) for url, log in logs.items()}


def _task(
    arm: Arm,
    problems: Sequence[Sample],
    sampling: Sampling,
    api_key: str | None,
    settings: dict[str, Any],
    grader: Grader,
) -> Task:
    return Task(
        name=f"aime {arm.url}",  # what a log is found by
        dataset=MemoryDataset(list(problems), name="problems"),
        solver=[generate(), refuse_aborted()],
        scorer=math_verify(grader),
        model=get_model(
            f"openai-api/sglang/{arm.served['model']}",
            base_url=f"{arm.url}/v1",
            api_key=api_key or "none",
        ),
        config=GenerateConfig(**asdict(sampling)),
        metadata=settings,
    )


@solver
def refuse_aborted() -> Solver:
    """A response that the server aborted is no sample: a weight update or a shutdown did it."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if state.output.stop_reason not in ("stop", "max_tokens"):
            raise RuntimeError(f"a response ended with {state.output.stop_reason!r}: no sample")
        return state

    return solve


def math_verify(grader: Grader) -> Scorer:
    """A scorer that asks `grader`; the grade's status is in the score's metadata."""

    @scorer(metrics=[accuracy()], name=SCORER)
    def graded() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            grade = await asyncio.to_thread(grader.grade, target.text, state.output.completion)
            return Score(
                value=CORRECT if grade.status == "correct" else INCORRECT,
                answer=grade.answer,
                metadata={"status": grade.status},
            )

        return score

    return graded()


def _check_same_settings(out: Path, wanted: dict[str, Any]) -> None:
    """Raise `ResultsError` if a log of this URL was taken otherwise: it must not be averaged in."""
    for info in list_eval_logs(str(out)) if out.is_dir() else []:
        before = read_eval_log(info, header_only=True).eval.metadata or {}
        if before.get("url") != wanted["url"]:
            continue
        changed = [
            f"{name} was {before.get(name)!r}, is {wanted.get(name)!r}"
            for name in sorted(before.keys() | wanted.keys())
            if before.get(name) != wanted.get(name)
        ]
        if changed:
            raise ResultsError(
                f"{out} ({wanted['url']})",
                "; ".join(changed),
                "samples of different settings must not be averaged",
                "Repeat the old settings to resume, or give another --out.",
            )
