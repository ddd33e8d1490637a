"""Taking the missing samples: every problem, n times, from every endpoint, several at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from .client import CompletionClient
from .grading import Grader
from .problems import Problem
from .results import ResultsFile

PROMPT_TEMPLATE = (
    "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
)

# Called with the endpoint and whether the sample was correct, for new and for resumed samples.
OnSample = Callable[[str, bool], None]


def ignore_sample(endpoint: str, correct: bool) -> None:
    """An `OnSample` that shows nothing."""


def to_prompt(problem: Problem, template: str) -> str:
    """Put the template around a statement; a row with a chat prompt of its own stays as it is."""
    return problem.text if problem.verbatim else template.format(problem=problem.text)


async def take_samples(
    clients: Sequence[CompletionClient],
    problems: Sequence[Problem],
    samples: int,
    results: ResultsFile,
    grader: Grader,
    *,
    template: str = PROMPT_TEMPLATE,
    concurrency: int = 64,
    on_sample: OnSample = ignore_sample,
) -> None:
    """Fill `results` up to `samples` responses of each problem from each client.

    What is there already is kept. The endpoints work at the same time, and every problem gets its
    i-th sample before any gets the next, so that an interrupted run is balanced.

    Args:
        concurrency: requests in flight per endpoint.

    Raises:
        ServerError, GradingError, ResultsError: the first failure ends the run; what was taken
            until then is in the file.
    """
    workers: list[asyncio.Task[None]] = []
    for client in clients:
        missing: list[tuple[Problem, int]] = []
        for index in range(samples):
            for problem in problems:
                found = results.find((problem.id, index, client.url), problem.digest)
                if found is None:
                    missing.append((problem, index))
                else:
                    on_sample(client.url, found["status"] == "correct")
        queue = iter(missing)

        async def work(
            client: CompletionClient = client, queue: Any = queue
        ) -> None:  # the workers of one endpoint share its queue
            for problem, index in queue:
                record = await _one_sample(client, to_prompt(problem, template), problem, grader)
                results.add((problem.id, index, client.url), problem.digest, record)
                on_sample(client.url, record["status"] == "correct")

        workers += [asyncio.create_task(work()) for _ in range(min(concurrency, len(missing)))]
    await _all_or_first_failure(workers)


async def _one_sample(
    client: CompletionClient, prompt: str, problem: Problem, grader: Grader
) -> dict[str, Any]:
    started = time.monotonic()
    completion = await client.complete(prompt)
    seconds = time.monotonic() - started
    grade = await asyncio.to_thread(grader.grade, problem.answer, completion.text)
    return {
        "status": grade.status,
        "answer": grade.answer,
        "reference": problem.answer,
        "finish_reason": completion.finish_reason,
        "tokens": completion.tokens,
        "seconds": round(seconds, 3),
        "text": completion.text,
        "reasoning": completion.reasoning,
    }


async def _all_or_first_failure(workers: list[asyncio.Task[None]]) -> None:
    try:
        await asyncio.gather(*workers)
    finally:  # also when this task itself is cancelled by Ctrl-C
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
