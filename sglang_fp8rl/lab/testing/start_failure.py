"""Why a server did not start, from its log: its first error, not the last of what follows from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_TRACEBACK = "Traceback (most recent call last)"
_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|^[\w .-]+: error: |" + re.escape(_TRACEBACK))
# A line of a traceback that goes on: a frame, its source, the bars of an exception group.
_INSIDE = re.compile(r"\s|\||\+|$")
_LINK = re.compile(r"During handling of|The above exception was")
# The kernel's words (uvicorn, ZeroMQ, gloo), torch's rendezvous, SGLang's own check.
_ADDRESS_IN_USE = re.compile(
    r"address already in use|EADDRINUSE|is not available in \d+ seconds", re.IGNORECASE
)
# Servers that serve say this too: SGLang asks itself for it before it listens.
_SURVIVED = re.compile(r"freeze_gc failed")
_MAX_CHARACTERS, _LAST_LINES = 2000, 20


def is_address_in_use(log: str) -> bool:
    """Whether something else had a port that the server wanted: another port may do."""
    return _ADDRESS_IN_USE.search(log) is not None


def cause_of(log: str) -> str:
    """The log's first error, with what its traceback raised; its last lines where it has none."""
    lines = log.splitlines()
    told = next(_errors(lines), None)
    if told is None:
        last = [line for line in lines if line.strip()][-_LAST_LINES:]
        return "no error in its log, which ends with:\n" + "\n".join(last)
    return "the first error in its log:\n" + "\n".join(told)[:_MAX_CHARACTERS]


def _errors(lines: Sequence[str]) -> Iterator[list[str]]:
    """Each error: the line that says so, and the last line of each traceback that follows from it."""
    at = 0
    while at < len(lines):
        if not _ERROR.search(lines[at]):
            at += 1
            continue
        said, before = lines[at].split(_TRACEBACK)[0].strip(), lines[at - 1] if at else ""
        raised, at = _chain(lines, at)
        if not _SURVIVED.search(said or before):
            # A chain is often printed twice over, once as the cause of what it led to.
            yield [line for line in dict.fromkeys([said, *raised]) if line.strip()]


def _chain(lines: Sequence[str], at: int) -> tuple[list[str], int]:
    """What was raised from the error at `at`, and where the log goes on."""
    raised = []
    if _TRACEBACK not in lines[at]:
        at += 1
    while at < len(lines) and _TRACEBACK in lines[at]:
        at += 1
        while at < len(lines) and _INSIDE.match(lines[at]):
            at += 1
        raised.append("".join(lines[at : at + 1]))
        at = after = at + 1
        while after < len(lines) and (not lines[after].strip() or _LINK.match(lines[after])):
            after += 1
        if after < len(lines) and _TRACEBACK in lines[after]:
            at = after
    return raised, at
