"""The Inspect task: every problem n times to a running server, graded; its log is what resumes.

Inspect does the sampling, the retries of requests and the log. What is here is who is asked, how a
response is graded, and that one log never mixes two settings. Imports `inspect_ai`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from inspect_ai import Task, eval_set
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.hooks import Hooks, hooks
from inspect_ai.log import EvalLog, list_eval_logs, read_eval_log, read_eval_log_sample_summaries
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver

from ...errors import EvaluationError
from .grading import Grader
from .options import EvalOptions
from .problems import digest

SCORER = "math_verify"  # the score's name in a log


def take_samples(
    served: Mapping[str, dict[str, Any]],
    problems: Sequence[Sample],
    options: EvalOptions,
    grader: Grader,
) -> list[EvalLog]:
    """Fill the logs in `options.out` up to n responses of each problem from each server, and read them.

    What is there already is kept. Inspect prints to stdout, which the caller has sent to stderr.

    Args:
        served: by URL, what a server says that it serves.

    Raises:
        EvaluationError: a request fails for good, and what was taken until then is in the logs; or there are
            samples of this URL under other settings.
    """
    # What the server's own defaults decide is not named here.
    sampling = {name: getattr(options, name) for name in ("temperature", "top_p", "max_tokens")}
    tasks = []
    for url, identity in served.items():
        settings = {"url": url, **sampling, "problems": digest(problems), "served": identity}
        _go_on_from_the_fullest(options.out, settings, options.samples)
        task = Task(
            name=f"aime {url}",  # what a log is found by
            dataset=MemoryDataset(list(problems), name="problems"),
            solver=answer_of_its_own(),
            scorer=math_verify(grader),
            model=get_model(
                f"openai-api/sglang/{identity['model']}",
                base_url=f"{url}/v1",
                api_key=options.api_key or "none",
            ),
            config=GenerateConfig(**sampling),
            metadata=settings,
        )
        tasks.append(task)
    _spare_the_search_for_hooks()
    _, headers = eval_set(
        tasks,
        log_dir=str(options.out),
        log_dir_allow_dirty=True,
        retry_attempts=1,  # requests are retried; whether a whole run is, the user decides
        epochs=options.samples,
        display="rich" if sys.stderr.isatty() else "plain",
        max_connections=options.concurrency,
        max_samples=options.concurrency,
        max_retries=options.retries,
        attempt_timeout=max(1, round(options.timeout)),
        log_buffer=1,  # a sample may take minutes: each is written as it comes
    )
    found = {log.eval.metadata["url"]: log for log in headers if log.eval.metadata}
    for url, log in found.items():
        if log.status != "success":
            raise EvaluationError(
                url,
                log.error.message if log.error else f"the run ended as {log.status}",
                "every request has to be answered",
                "Check the server, and that there is room to write; a prompt and --max-tokens must fit its "
                f"context. Samples are kept in {options.out}, the same command resumes.",
            )
    return [read_eval_log(found[url].location) for url in served]


@solver
def answer_of_its_own() -> Solver:
    """Ask with a seed for each epoch: a deterministic server gives one answer n times to requests without.

    A response that the server aborted is no sample: a weight update or a shutdown did it.
    """

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state, seed=state.epoch)
        if state.output.stop_reason not in ("stop", "max_tokens"):
            raise RuntimeError(f"a response ended with {state.output.stop_reason!r}: no sample")
        return state

    return solve


def math_verify(grader: Grader) -> Scorer:
    """A scorer that asks `grader`; the grade's status is in the score's metadata."""

    @scorer(metrics=[accuracy()], name=SCORER)  # without arguments, which Inspect would log
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


class _NoHooks(Hooks):
    def enabled(self) -> bool:
        return False


def _spare_the_search_for_hooks() -> None:
    """Give Inspect a hook that does nothing, unless a package brings hooks.

    Inspect 0.3.145 that has none looks for them in all packages at every event: 80 ms of each sample.
    """
    if not entry_points(group="inspect_ai"):
        hooks(name="none", description="does nothing")(_NoHooks)


def _go_on_from_the_fullest(out: Path, wanted: dict[str, Any], n: int) -> None:
    """Make the log of this URL with the most of the n samples the newest, from which Inspect goes on: one that was
    interrupted early has fewer than it found, as samples are copied one by one.

    Raises:
        EvaluationError: a log of this URL was taken otherwise, and must not be averaged in; or one is damaged.
    """
    samples: dict[Path, int] = {}
    for info in list_eval_logs(str(out)) if out.is_dir() else []:
        try:
            before = read_eval_log(info, header_only=True).eval.metadata or {}
            found = read_eval_log_sample_summaries(info)
            taken = sum(one.error is None and one.epoch <= n for one in found)
        except Exception as error:  # of half a file, as a full disk leaves it: of any kind
            raise EvaluationError(
                info.name.removeprefix("file://"),
                f"{type(error).__name__}: {error}",
                "every log in --out has to be whole",
                "Move it away, and what was in it is sampled again; or give another --out.",
            ) from error
        if before.get("url") != wanted["url"]:
            continue
        changed = [
            f"{name} was {before.get(name)!r}, is {wanted.get(name)!r}"
            for name in sorted(before.keys() | wanted.keys())
            if before.get(name) != wanted.get(name)
        ]
        if changed:
            raise EvaluationError(
                f"{out} ({wanted['url']})",
                "; ".join(changed),
                "samples of different settings must not be averaged",
                "Repeat the old settings to resume, or give another --out.",
            )
        samples[Path(info.name.removeprefix("file://"))] = taken
    if samples:
        os.utime(max(samples, key=samples.__getitem__))
