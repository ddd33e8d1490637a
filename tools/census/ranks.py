"""The processes of one class, one for each rank: whatever becomes of one, the others are ended in time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .host import last_error
from .outcome import KINDS, OUT_OF_TIME, Row

OTHERS_SECONDS = 20.0  # for what the other ranks still do when one has ended

# Called in the process of a rank: leaves its row as `row.json` in the directory, of that rank's own.
JudgeRank = Callable[[str, Path, int], None]


def run_forked(
    architecture: str,
    judge: JudgeRank,
    limit: float,
    ranks: int = 1,
    others: float = OTHERS_SECONDS,
) -> Row:
    """`judge` in a fork for each rank, ended after `limit` seconds; a row whatever happens there."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="census-") as name:
        directory = Path(name)
        for rank in range(ranks):
            (directory / str(rank)).mkdir()
        leader = os.fork()
        if not leader:
            _lead(architecture, judge, directory, ranks, others)
        is_in_time = _has_ended(leader, began + limit)
        why = f"{OUT_OF_TIME} {limit:g} s"
        if is_in_time:
            why = f"no answer {others:g} s behind the other rank's"
        rows = [_row(architecture, directory / str(rank), why) for rank in range(ranks)]
    row = merged(rows)
    row.seconds = round(time.monotonic() - began, 1)
    return row


def _lead(architecture: str, judge: JudgeRank, directory: Path, ranks: int, others: float) -> None:
    """Never returns. A process in between takes the SIGQUIT that SGLang sends its parent."""
    os.setsid()
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if not child:
            _run(architecture, judge, directory / str(rank), rank)
        children[child] = rank
    deadline = float("inf")
    while children and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.02)
            continue
        rank = children.pop(pid)
        (directory / str(rank) / "status").write_text(str(os.waitstatus_to_exitcode(status)))
        deadline = min(deadline, time.monotonic() + others)
    os._exit(0)


def _run(architecture: str, judge: JudgeRank, directory: Path, rank: int) -> None:
    """Never returns."""
    with (directory / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        judge(architecture, directory, rank)
    except BaseException:  # noqa: BLE001  it ends here
        import traceback

        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _has_ended(leader: int, deadline: float) -> bool:
    """Whether it ended by itself; what is left of its group is ended."""
    while time.monotonic() < deadline:
        if os.waitpid(leader, os.WNOHANG)[0]:
            _end_group(leader)  # a rank that hangs, and threads' processes
            return True
        time.sleep(0.02)
    _end_group(leader)
    os.waitpid(leader, 0)
    return False


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _row(architecture: str, directory: Path, why_not_ended: str) -> Row:
    """Of one rank: its answer, or what its end says."""
    answer, ended = directory / "row.json", directory / "status"
    if answer.exists():
        return Row(**json.loads(answer.read_text()))
    if not ended.exists():
        return Row(architecture, "not built", reasons=[why_not_ended])
    reason = last_error((directory / "log").read_text(errors="replace"))
    status = int(ended.read_text())
    if status < 0:
        reason = f"ended by signal {-status}: {reason}"
    return Row(architecture, "not built", reasons=[reason[:400]])


def merged(rows: list[Row]) -> Row:
    """Of all ranks: the worst kind, what holds on each of them, and what any of them says."""
    if len(rows) == 1:
        return rows[0]
    row = max(rows, key=lambda one: KINDS.index(one.kind))
    found = Row(row.architecture, row.kind, named_by=row.named_by, lost=row.lost)
    found.names = max(one.names for one in rows)
    found.held, found.reached = sum(one.held for one in rows), sum(one.reached for one in rows)
    found.relies_on = sorted({what for one in rows for what in one.relies_on})
    for rank, one in enumerate(rows):
        for name, count in one.schemes.items():
            found.schemes[name] = found.schemes.get(name, 0) + count
        if one.silent:
            found.silent += [f"{place} (rank {rank})" for place in one.silent]
    for lists in ("reasons", "unreached", "unproven"):
        setattr(found, lists, _told([getattr(one, lists) for one in rows]))
    for text in ("whole_only", "not_started", "not_run"):
        told = _told([[said] if (said := getattr(one, text)) else [] for one in rows])
        setattr(found, text, "; ".join(told))
    for flag in ("is_parted", "other_names", "is_proven"):
        setattr(found, flag, all(getattr(one, flag) for one in rows))
    return found


def _told(said: list[list[str]]) -> list[str]:
    """What ranks say; with the rank where not all say it."""
    found = []
    for rank, lines in enumerate(said):
        for line in lines:
            is_common = all(line in other for other in said)
            found.append(line if is_common else f"{line} (rank {rank})")
    return list(dict.fromkeys(found))
