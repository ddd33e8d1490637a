"""A server whose launcher is forked from a process that has SGLang imported: it starts in seconds.

From there on it is `sglang_fp8rl.testing.launch`: SGLang's launcher with this command line. What an
interpreter of its own does is seen where `ServerProcess` itself is used (the demo, the soak).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from forked import CONTEXT

from sglang_fp8rl.testing.server import Launched, ServerProcess


class ForkedServer(ServerProcess):
    """As `ServerProcess`. Of its variables, those that libraries read while they are imported come too late."""

    def _launch(self) -> Launched:
        # python -m sglang_fp8rl.testing.launch FLAGS
        return _Forked(self.command[3:], self.env, self.log_path)


class _Forked:
    """What `Launched` asks for, of a process of the fork server."""

    def __init__(self, flags: list[str], env: dict[str, str], log: Path) -> None:
        self._process: Any = CONTEXT.Process(target=_launcher, args=(flags, env, log))
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode


def _launcher(flags: list[str], env: dict[str, str], log: Path) -> None:
    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["launch_server", *flags]
    from sglang_fp8rl.testing.launch import main

    main()
