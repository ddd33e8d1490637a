"""What SGLang and torch say goes to a file, and the terminal belongs to the benchmark.

Schedulers, their fork server and libraries of C++ write to the file descriptors, not to Python's
streams, so the descriptors are what is redirected.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

_WIDTH = 120  # for tables, where the output is no terminal


@contextlib.contextmanager
def host_log(name: str) -> Iterator[Console]:
    """Redirect stdout and stderr of this process and its children; yields the console to use.

    Side Effects:
        Writes a temporary file, deleted at the end. If the block is left by an exception, an exit
        status among them, the file stays and the console names it.
    """
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    try:
        with os.fdopen(os.dup(1), "w") as shown:
            console = Console(file=shown, width=None if shown.isatty() else _WIDTH)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            try:
                yield console
            except BaseException:
                console.print(f"the host's log is kept in {path}", markup=False, soft_wrap=True)
                raise
            else:
                Path(path).unlink()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in enumerate(saved, start=1):
            os.dup2(before, number)
            os.close(before)
        os.close(descriptor)
