"""Imports SGLang once, then forks for every class that it is asked for: one line in, one line out."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .host import last_error, start
from .outcome import OUT_OF_TIME, Row
from .preload import import_sglang, prepare_environment


def main(limit: float) -> None:
    """Architectures on stdin, `Row`s as JSON on stdout."""
    prepare_environment()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what SGLang prints is no answer
    import_sglang()
    from .configs import warm_up

    warm_up()
    gc.freeze()  # a collection in a child would copy all of it
    for line in sys.stdin:
        print(json.dumps(row_of(line.strip(), limit).__dict__), file=answers)


def row_of(architecture: str, limit: float, save_to: Path | None = None) -> Row:
    """Judged again as long as its config lacks a key, which is added, or refuses one that it wrote.

    Args:
        save_to: a directory that gets checkpoints of the class, instead of judging it.
    """
    lacks: list[str] = []
    refuses: list[str] = []
    attention = CPU_ATTENTION
    while True:
        run = functools.partial(
            judge, lacks=lacks, refuses=refuses, attention=attention, save_to=save_to
        )
        row = run_forked(architecture, run, limit)
        why = " ".join(row.reasons)
        lacked, refused = _LACKS.search(why), _REFUSES.search(why)
        if lacked and lacked[1] not in lacks:
            lacks.append(lacked[1])
        elif refused and refused[1] not in refuses:
            refuses.append(refused[1])
        elif _ATTENTION.search(why) and attention == CPU_ATTENTION:
            attention = (
                "triton"  # some models ask for one of SGLang's GPU backends by name; none runs here
            )
        else:
            return row


_LACKS = re.compile(
    r"(?:'\w*Config\w*' object has no attribute|error for field) '(\w+)'(?!.*got (?!None))"
)
_ATTENTION = re.compile(r"only supports? .*attention|attention.* backend")
CPU_ATTENTION = "torch_native"
_REFUSES = re.compile(r"property '(\w+)' of '\w+' object has no setter")


def judge(
    architecture: str,
    directory: Path,
    lacks: list[str],
    refuses: list[str],
    attention: str,
    save_to: Path | None = None,
) -> None:
    """In a process of its own: the row into `row.json`."""
    from sglang.srt.models.registry import ModelRegistry

    from .classes import why_missing
    from .configs import tiny_config
    from .judge import Judge, Saver

    def answer(row: Row) -> None:
        (directory / "row.json").write_text(json.dumps(row.__dict__))

    model_class = ModelRegistry.models.get(architecture)
    if model_class is None:
        answer(Row(architecture, "not built", reasons=[why_missing(architecture)]))
        return
    lost = tiny_config(architecture, model_class, directory, lacks, refuses)
    present = Judge(architecture, answer)
    if save_to is not None:
        present = Saver(architecture, answer, save_to)
    present.row.lost = lost
    start(directory, attention, present)


def run_forked(architecture: str, judge: Callable[[str, Path], None], limit: float) -> Row:
    """`judge` in a fork, ended after `limit` seconds; a row whatever happens there."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="census-") as name:
        directory = Path(name)
        child = os.fork()
        if not child:
            _run(architecture, judge, directory)
        status = _ended(child, began + limit)
        row = _row(architecture, directory, status, limit)
    row.seconds = round(time.monotonic() - began, 1)
    return row


def _run(architecture: str, judge: Callable[[str, Path], None], directory: Path) -> None:
    """Never returns. A process in between takes the SIGQUIT that SGLang sends its parent."""
    os.setsid()
    with (directory / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    inner = os.fork()
    if inner:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF)
    try:
        judge(architecture, directory)
    except BaseException:  # noqa: BLE001  it ends here
        import traceback

        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _ended(child: int, deadline: float) -> int | None:
    """Its exit status; None if it had to be ended."""
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            _end_group(child)  # threads' processes that it left
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    _end_group(child)
    os.waitpid(child, 0)
    return None


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _row(architecture: str, directory: Path, status: int | None, limit: float) -> Row:
    answer = directory / "row.json"
    if answer.exists():
        return Row(**json.loads(answer.read_text()))
    if status is None:
        return Row(architecture, "not built", reasons=[f"{OUT_OF_TIME} {limit:g} s"])
    reason = last_error((directory / "log").read_text(errors="replace"))
    if status > 128 or status < 0:
        reason = f"ended by signal {status - 128 if status > 128 else -status}: {reason}"
    return Row(architecture, "not built", reasons=[reason[:400]])


if __name__ == "__main__":
    main(float(sys.argv[1]))
