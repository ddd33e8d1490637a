"""A server whose launcher is forked from a process that has SGLang imported: it starts in seconds.

From there on it is `sglang_fp8rl.lab.testing.launch`: SGLang's launcher with this command line. What an
interpreter of its own does is seen where `ServerProcess` itself is used (the demo, the soak).
"""

from __future__ import annotations

import sys

from sglang_fp8rl.lab.testing.server import ServerProcess
from support.engine.forked import Forked


class ForkedServer(ServerProcess):
    """As `ServerProcess`, but for what a library reads from the environment while it is imported."""

    def _launch(self) -> Forked:
        # python -m sglang_fp8rl.lab.testing.launch FLAGS
        return Forked(_launcher, (self.command[3:],), self.log_path, self.env)


def _launcher(flags: list[str]) -> None:
    sys.argv = ["launch_server", *flags]
    from sglang_fp8rl.lab.testing.launch import main

    main()
