"""Processes forked from a server that has SGLang imported and its plugins loaded already: they start at once.

SGLang's scheduler sends SIGQUIT to its parent when it fails. `run_forked` puts a process in between,
so that the fork server does not get it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

# Before the fork server starts: its children import SGLang with it.
os.environ["SGLANG_PLATFORM"] = "fp8rl_cpu"
os.environ["TORCHDYNAMO_DISABLE"] = "1"
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["sglang_fp8rl.lab.testing.preload_plugins"])
_OTHER_SERVER = forkserver.ForkServer()
_OTHER_SERVER.set_forkserver_preload(["sglang_fp8rl.lab.testing.preload"])


class WithoutPlugins(CONTEXT.Process):  # type: ignore[name-defined]
    """A process whose plugins are not loaded yet: for what loads them itself, and for tests of that."""

    def start(self) -> None:
        # Python has one fork server in a process, and no place to say which.
        connect = _OTHER_SERVER.connect_to_new_process
        with mock.patch.object(forkserver, "connect_to_new_process", connect):
            super().start()


def run_forked(
    target: Callable[..., Any],
    args: Sequence[Any],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    process_class: type = CONTEXT.Process,
) -> str:
    """`target(*args)` with its output in `log`; how it ended, in words."""
    process = process_class(target=_between, args=(target, args, log, dict(env or {})))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return f"not done after {timeout} s"
    return f"exit status {process.exitcode}"


class Forked:
    """A process of its own group, without plugins, that goes on beside the test; like a `subprocess.Popen`.

    Args:
        target: called in the process.
        log: takes its output; stdout too, unless `target` puts it elsewhere.
        env: all of its environment. What libraries read while they are imported comes too late.
    """

    def __init__(
        self, target: Callable[..., Any], args: Sequence[Any], log: Path, env: Mapping[str, str]
    ) -> None:
        self._process: Any = WithoutPlugins(target=_alone, args=(target, args, log, dict(env)))
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


def _alone(target: Callable[..., Any], args: Sequence[Any], log: Path, env: dict[str, str]) -> None:
    _lead_a_group(log)
    os.environ.clear()
    os.environ.update(env)
    target(*args)


def run_plan(args: Sequence[str], env: Mapping[str, str], log: Path) -> str:
    """As `plan_offline.run_in_new_interpreter`, without importing SGLang again."""
    return run_forked(_plan, (list(args),), log, env=env)


def _plan(args: list[str]) -> None:
    from sglang_fp8rl.lab.plan_offline import child_main

    child_main(args)


def _between(
    target: Callable[..., Any], args: Sequence[Any], log: Path, env: dict[str, str]
) -> None:
    _lead_a_group(log)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    os.environ.update(env)
    child = os.fork()
    if not child:
        status = 1
        try:
            target(*args)
            status = 0
        except BaseException:  # noqa: BLE001  it ends here
            traceback.print_exc()
        finally:
            os._exit(status)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)


def _lead_a_group(log: Path) -> None:
    """A process group of its own, its output in `log`."""
    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
