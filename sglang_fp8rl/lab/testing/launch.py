"""`python -m sglang.launch_server`, with its workers forked instead of spawned.

Spawned ones import everything anew, which is most of the time a small server takes to start. SGLang spawns
because a CUDA context does not survive a fork; on the CPU platform there is none. Nothing else differs.
"""

from __future__ import annotations

import multiprocessing
import runpy
from typing import Any

SPAWNS = "sglang.srt.entrypoints.engine._set_envs_and_config"  # calls set_start_method("spawn")


def fork_workers() -> None:
    """Side effect: an engine that this process launches forks its workers."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def fork(result: Any, *args: Any, **kwargs: Any) -> None:
        multiprocessing.set_start_method("fork", force=True)

    HookRegistry.register(SPAWNS, fork, HookType.AFTER)


def main() -> None:
    """Run SGLang's own launcher with this process's command line; it dies with its parent."""
    from sglang.srt.utils import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    fork_workers()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
