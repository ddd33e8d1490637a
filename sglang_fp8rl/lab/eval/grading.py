"""Is a response's final answer right? Judged by the Math-Verify library, in processes of its own.

Processes, because responses are untrusted: `\\boxed{2003^{2002^{2001}}}` keeps a symbolic library busy
for ever, Math-Verify's own time limit needs the main thread, and only a process can be killed.
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import re
import time
from concurrent.futures import TimeoutError as DeadlineError
from dataclasses import dataclass
from typing import Literal

from ...errors import EvaluationError

Status = Literal["correct", "wrong", "no_answer", "timeout"]

MEMORY_LIMIT = 4 << 30  # bytes of address space: an answer like 10^(10^9) must not take the host
TIME_LIMIT = 5  # seconds, for reading and for comparing each
DEADLINE = 15.0  # seconds, after which the process is killed
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # one behind a backslash is a sign, no brace
_BOLD = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])")  # Markdown's, no power
# What the library's LaTeX parser does not know or fails at, and how it reads it.
_READABLE = (
    (re.compile(r"\\[bp]mod\b"), r"\\mod"),
    (re.compile(r"\\equiv\b"), "="),
    (re.compile(r"\s*(\\?%|\.)\s*\}$"), r"}\1"),  # a percent or full stop, behind the box
)
_TAIL = 2_000  # characters in which "the answer is ..." is looked for when nothing is boxed


@dataclass(frozen=True)
class Grade:
    """The verdict on one response; `answer` is the text that was judged."""

    status: Status
    answer: str


class Grader:
    """Grades responses; safe to share between threads. Use as a context manager.

    Side Effects:
        Starts up to four processes when something is graded, and ends them on leaving.
    """

    def __init__(self, deadline: float = DEADLINE, workers: int | None = None) -> None:
        require_packages()
        from pebble import ProcessPool

        self._deadline = deadline
        self._pool = ProcessPool(
            max_workers=workers or min(4, os.cpu_count() or 1),
            initializer=_start_worker,
            context=multiprocessing.get_context("spawn"),
        )

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.stop()
        self._pool.join()

    def grade(self, reference: str, response: str) -> Grade:
        """Judge `response` against `reference`. Blocks; see `final_answer` for what is judged.

        Raises:
            EvaluationError: the verifier's process died.
        """
        from pebble import ProcessExpired

        answer = final_answer(response)
        if not answer.strip():
            return Grade("no_answer", "")
        work = self._pool.schedule(_judge, args=[reference, answer], timeout=self._deadline)
        try:
            return Grade(work.result(), answer[-200:])
        except DeadlineError:
            return Grade("timeout", answer[-200:])
        except ProcessExpired as error:
            raise EvaluationError(
                "grading",
                f"the verifier's process ended with status {error.exitcode}",
                "it has to live until it is closed",
                "Run the same command again to resume.",
            ) from error

    def check_reference(self, subject: str, reference: str) -> None:
        """Raise `EvaluationError` unless the verifier reads the reference, as equal to itself."""
        if self.grade(reference, f"\\boxed{{{reference}}}").status != "correct":
            raise EvaluationError(
                subject,
                f"answer {reference!r}",
                "the verifier can't read it, so every response would be wrong",
                "Write it as a number or as LaTeX; nothing was sent.",
            )


def final_answer(response: str) -> str:
    """The part of a response that states its answer; empty if it was cut off in a box.

    What counts is the last `\\boxed{...}` after any `</think>`; without one, the end of the text,
    where an explicit "the answer is ..." is looked for. Math-Verify joins several boxes into one
    value (`\\boxed{5} ... \\boxed{204}` becomes 5204), so only the last one may reach it.
    """
    text = response.rpartition("</think>")[2]
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return _BOLD.sub("", text[-_TAIL:])
    start, depth = boxes[-1].end(), 0
    for found in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return "\\boxed" + text[start : found.end()]
    return ""


def require_packages() -> None:
    """Raise `EvaluationError` if samples could not be taken or graded here."""
    needed = ("inspect_ai", "math_verify", "pebble")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise EvaluationError(
            "eval-aime",
            f"no module {' and '.join(missing)}",
            "samples are taken by Inspect and judged by the Math-Verify library",
            'Install "sglang-fp8rl[lab]".',
        )


# -- inside a verifier's process ------------------------------------------------------------------


def _start_worker() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    import math_verify  # noqa: F401  # here, so that no answer's deadline pays for it

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # a time-out is a status, not a log


def _judge(reference: str, answer: str) -> Status:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # Anchors only: "x=1 204" names no answer, though it would be read as one.
    targets = [
        LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),
        ExprExtractionConfig(try_extract_without_anchor=False),
    ]
    started = time.monotonic()
    wanted = parse(f"\\boxed{{{reference}}}", targets, parsing_timeout=TIME_LIMIT)
    if wanted and all(isinstance(one, str) for one in wanted):  # letters, of no known meaning
        return "no_answer"
    for pattern, readable in _READABLE:
        answer = pattern.sub(readable, answer)
    found = parse(answer, targets, parsing_timeout=TIME_LIMIT)
    if verify(wanted, found, timeout_seconds=TIME_LIMIT):
        return "correct"
    if time.monotonic() - started >= TIME_LIMIT:
        return "timeout"
    return "wrong" if found else "no_answer"
