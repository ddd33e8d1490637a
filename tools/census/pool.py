"""Workers that judge classes side by side; whatever becomes of one, the others go on."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from .layout import ONE_RANK, Layout
from .outcome import Row
from .preload import ENVIRONMENT

REPOSITORY = Path(__file__).parents[2]
LIMIT_SECONDS = 240.0  # a class; on a quiet machine none needs a tenth of it


class WorkerDied(Exception):
    """A worker ended, not only a class in it."""


def rows_of(
    architectures: Sequence[str],
    workers: int = 2,
    limit: float = LIMIT_SECONDS,
    layout: Layout = ONE_RANK,
) -> Iterator[Row]:
    """A row for each, as they come."""
    waiting: queue.Queue[str] = queue.Queue()
    done: queue.Queue[Row | Exception] = queue.Queue()
    for one in architectures:
        waiting.put(one)
    processes = [_start(limit, layout) for _ in range(min(workers, len(architectures)))]
    try:
        for process in processes:
            threading.Thread(target=_feed, args=(process, waiting, done), daemon=True).start()
        for _ in architectures:
            found = done.get()
            if isinstance(found, Exception):
                raise found
            yield found
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(limit: float, layout: Layout) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tools.census.worker", str(limit), layout.name],
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _feed(
    process: subprocess.Popen[str],
    waiting: queue.Queue[str],
    done: queue.Queue[Row | Exception],
) -> None:
    """One worker's life: a line to it, a line from it."""
    assert process.stdin is not None
    assert process.stdout is not None
    while True:
        try:
            architecture = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            process.stdin.write(f"{architecture}\n")
            process.stdin.flush()
            done.put(Row(**json.loads(process.stdout.readline())))
        except (OSError, ValueError, TypeError):
            done.put(WorkerDied(f"a worker ended at {architecture}, status {process.wait()}"))
            return
