"""Is a response's final answer right? Judged by the Math-Verify library, in a child process.

A child, because responses are untrusted: `\\boxed{2003^{2002^{2001}}}` keeps a symbolic library busy
for ever, Math-Verify's own time limit needs the main thread, and only a process can be killed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import select
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import IO, Literal

from ..errors import Fp8RlError

Status = Literal["correct", "wrong", "no_answer", "timeout"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_TAIL = 2_000  # characters in which "the answer is ..." is looked for when nothing is boxed
_START_LIMIT = 120.0  # seconds; importing a symbolic library from a cold disk is slow


class GradingError(Fp8RlError):
    """The verifier is missing or died, or a reference answer can't be read."""


@dataclass(frozen=True)
class Grade:
    """The verdict on one response; `answer` is the text that was judged."""

    status: Status
    answer: str

    @property
    def correct(self) -> bool:
        return self.status == "correct"


class Grader:
    """Grades one response at a time; safe to share between threads. Use as a context manager.

    Args:
        deadline: seconds after which the child is killed and the grade is `timeout`. Math-Verify
            itself gives up after 5 seconds of reading and 5 of comparing.
    """

    def __init__(self, deadline: float = 15.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise GradingError(
                "grading",
                "no module `math_verify`",
                "answers are judged by the Math-Verify library",
                'Install "sglang-fp8rl[eval]".',
            )
        self.deadline = deadline
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child process, if there is one."""
        with self._lock:
            self._stop()

    def grade(self, reference: str, response: str) -> Grade:
        """Judge `response` against `reference`.

        What counts is the last `\\boxed{...}` after any `</think>`; without one, an explicit "the
        answer is ..." or "Answer: ..." near the end. A number merely mentioned is no answer.
        """
        answer = final_answer(response)
        if not answer.strip():
            return Grade("no_answer", "")
        with self._lock:
            reply = self._ask({"reference": reference, "answer": answer})
        return Grade("timeout" if reply is None else reply["status"], answer[-200:])

    def check_reference(self, subject: str, reference: str) -> None:
        """Raise `GradingError` unless the verifier takes the reference for equal to itself."""
        if not self.grade(reference, f"\\boxed{{{reference}}}").correct:
            raise GradingError(
                subject,
                f"answer {reference!r}",
                "the verifier can't read it, so every response would be wrong",
                "Write it as a number or as LaTeX; nothing was sent.",
            )

    def _ask(self, request: dict[str, str]) -> dict | None:
        if self._child is None:
            self._child = self._start()
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError as error:
            raise _died(self._child) from error
        reply = self._read(self._child, self.deadline)
        if reply is None:
            self._stop()
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-m", "sglang_fp8rl.eval.grader_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        if self._read(child, _START_LIMIT) is None:
            child.kill()
            raise GradingError(
                "grading",
                f"no sign of life after {_START_LIMIT:.0f} s",
                "the verifier starts in its own process",
                "Check the load of the machine.",
            )
        return child

    def _read(self, child: subprocess.Popen[bytes], limit: float) -> dict | None:
        assert child.stdout is not None
        if not _readable(child.stdout, limit):
            return None
        line = child.stdout.readline()
        if not line:
            raise _died(child)
        return json.loads(line)

    def _stop(self) -> None:
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        self._child = None


def final_answer(response: str) -> str:
    """Return the part of a response that states its answer; empty if it was cut off in a box.

    Math-Verify joins several boxes into one value (`\\boxed{5} ... \\boxed{204}` becomes 5204), so
    only the last one may reach it.
    """
    text = response.rpartition("</think>")[2]
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return text[-_TAIL:]
    start = boxes[-1].end()
    depth = 0
    for position in range(start, len(text)):
        character = text[position]
        escaped = text[position - 1] == "\\" and text[position - 2] != "\\"
        depth += 0 if escaped else (character == "{") - (character == "}")
        if depth == 0:
            return "\\boxed" + text[start : position + 1]
    return ""


def _died(child: subprocess.Popen[bytes]) -> GradingError:
    return GradingError(
        "grading",
        f"the verifier's process ended with status {child.wait()}",
        "it lives until it is closed",
        "Its own message is above; run the same command again to resume.",
    )


def _readable(stream: IO[bytes], seconds: float) -> bool:
    return bool(select.select([stream], [], [], seconds)[0])
