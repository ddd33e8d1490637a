"""Why a server did not start, from its log: its first error, not the last of what follows from it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

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
    errors = _errors(lines)
    if not errors:
        last = [line for line in lines if line.strip()][-_LAST_LINES:]
        return "no error in its log, which ends with:\n" + "\n".join(last)
    # A chain is often printed twice over, once as the cause of what it led to.
    said = "\n".join(dict.fromkeys(line for line in errors[0] if line.strip()))
    return "the first error in its log:\n" + said[:_MAX_CHARACTERS]


def _errors(lines: Sequence[str]) -> list[list[str]]:
    """Each error: the line that says so, and the last line of each traceback that follows from it."""
    errors: list[list[str]] = []
    current: list[str] = []
    state = "outside"  # or in the frames of a "traceback", or right "behind" an error
    for before, line in itertools.pairwise(["", *lines]):
        if state == "traceback":
            if not _INSIDE.match(line):
                current.append(line)
                state = "behind"
        elif state == "behind" and _TRACEBACK in line:
            state = "traceback"
        elif _ERROR.search(line):
            said = line.split(_TRACEBACK)[0].strip()
            current = [said]
            errors += [] if _SURVIVED.search(said or before) else [current]
            state = "traceback" if _TRACEBACK in line else "behind"
        elif line.strip() and not _LINK.match(line):
            state = "outside"
    return errors
