"""A real SGLang scheduler per tensor-parallel rank, commanded over a pipe instead of ZMQ.

Everything is SGLang's own code from `run_scheduler_process` down: server arguments, distributed
groups, model, loaders, weight updater, our plugin and its hooks. Only the event loop is replaced
by one that runs the functions a test sends, so that a test can look at bytes and addresses. What
goes over HTTP is tested on servers (`test_server_*.py`).

SGLang compiles a few functions (expert routing) with `torch.compile` at their first call, 20 to 40
seconds in every process; here they run as they are written. Servers compile them.

Children are forked from a process that has SGLang imported and its plugins loaded already, so a host starts
in about a second.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

from support.engine.commands import digests, status, update
from support.engine.forked import CONTEXT

_START_SECONDS = 240
_OTHERS_SECONDS = 20  # for what the other ranks say of a call that one rank has failed


class EngineError(RuntimeError):
    """A function failed inside a scheduler; the text is its traceback."""


class EngineHost:
    """Schedulers of one engine on the CPU platform.

    Args:
        model_path: checkpoint directory.
        quantization: as on the command line; None serves unquantized.
        tp_size: ranks.
        args: further command-line arguments.
        radix_cache: whether prompts may hit what earlier ones left in the cache.
        env: variables set in the schedulers. The fork server keeps its own copy of the environment,
            so one that a test sets does not reach them.

    `is_stuck` says that a rank did not answer the last call: it can't be asked again.
    """

    is_stuck = False

    def __init__(
        self,
        model_path: Path | str,
        *,
        quantization: str | None = "fp8_blockwise_online",
        tp_size: int = 1,
        args: tuple[str, ...] = (),
        radix_cache: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        argv = command_line(model_path, quantization)
        argv += ["--tp-size", str(tp_size), *args]
        argv += [] if radix_cache else ["--disable-radix-cache"]
        self.tp_size = tp_size
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._stacks = tempfile.NamedTemporaryFile(suffix=".stacks")  # noqa: SIM115  until `close`
        launch = None
        for rank in range(tp_size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=run_rank,
                args=(theirs, argv, tp_size, rank, launch, dict(env or {}), self._stacks.name),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
            if launch is None:
                launch = self._receive(ours)
        for pipe in self._pipes:
            self._receive(pipe)

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """`function(scheduler, *args)` on every rank at once; rank 0's result."""
        return self.call_all(function, *args, **options)[0]

    def call_all(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """`function(scheduler, *args)` on every rank at once; all results, by rank."""
        if options:
            function = functools.partial(function, **options)
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._receive_all()

    def send(self, items: list[Any], *options: Any, **more: Any) -> None:
        """Update, and check that it was taken on every rank."""
        for success, message in self.call_all(update, items, *options, **more):
            assert success, message

    def refuses(self, items: list[Any], *words: str, **options: Any) -> str:
        """Send what every rank has to refuse, in all of these words, and its status knows; what rank 0 says."""
        answers = self.call_all(update, items, **options)
        for success, message in answers:
            assert not success
            assert [word for word in words if word not in message] == [], message
        assert [rank["state"] for rank in self.call_all(status)] == ["failed"] * self.tp_size
        return answers[0][1]

    def refuses_and_keeps(self, items: list[Any], *words: str, **options: Any) -> str:
        """As `refuses`, and no byte of the model is another one."""
        before = self.call_all(digests)
        said = self.refuses(items, *words, **options)
        assert self.call_all(digests) == before
        return said

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._stacks.close()

    def __enter__(self) -> EngineHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, pipe: Any) -> Any:
        if not pipe.poll(_START_SECONDS):
            raise self._no_answer()
        failed, value = _read(pipe)
        if failed:
            raise EngineError(value)
        return value

    def _receive_all(self) -> list[Any]:
        """Every rank's answer; a rank's failure, though the others may wait for that rank for ever."""
        answers: dict[Any, tuple[bool, Any]] = {}
        waiting = list(self._pipes)
        while waiting:
            has_failed = any(failed for failed, _ in answers.values())
            ready = connection.wait(waiting, _OTHERS_SECONDS if has_failed else _START_SECONDS)
            if not ready:
                break
            for pipe in ready:
                waiting.remove(pipe)
                answers[pipe] = _read(pipe)
        self.is_stuck = bool(waiting)
        for failed, value in answers.values():
            if failed:
                raise EngineError(value)
        if waiting:
            raise self._no_answer()
        return [answers[pipe][1] for pipe in self._pipes]

    def _no_answer(self) -> EngineError:
        return EngineError(f"no answer from the scheduler after {_START_SECONDS} s{self._where()}")

    def _where(self) -> str:
        """What every rank is doing, for a person who reads why a test failed."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)  # nothing tells when they have written it
        return "\n" + Path(self._stacks.name).read_text()


def _read(pipe: Any) -> tuple[bool, Any]:
    """Whether the rank failed, and its result or traceback."""
    try:
        return pipe.recv()
    except EOFError:
        return True, "the scheduler process ended"


def command_line(model_path: Path | str, quantization: str | None) -> list[str]:
    """Arguments that every engine has."""
    argv = ["--model-path", str(model_path), "--skip-tokenizer-init", "--device", "cpu"]
    return [*argv, "--quantization", quantization] if quantization else argv


def run_rank(
    pipe: Any,
    argv: list[str],
    tp_size: int,
    rank: int,
    launch: Any,
    env: Mapping[str, str],
    stacks: str = os.devnull,
) -> None:
    """One rank's process: answers `launch` (rank 0), then readiness, then what it is sent.

    At SIGUSR1 it appends the stacks of its threads to the file `stacks`.
    """
    faulthandler.register(signal.SIGUSR1, open(stacks, "a"))  # noqa: SIM115  as long as it lives
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(_cores(tp_size))
    os.environ.update(env)
    try:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        if launch is None:
            from sglang.srt.server_args import PortArgs, prepare_server_args

            server_args = prepare_server_args(argv)
            launch = (server_args, PortArgs.init_new(server_args))
            pipe.send((False, launch))
        from sglang.srt.managers import scheduler as host

        def serve(scheduler: Any) -> None:
            pipe.send((False, None))
            _serve(pipe, scheduler)

        host.Scheduler.run_event_loop = serve
        writer = _Ignore()
        if "attn_cp_rank" in host.run_scheduler_process.__code__.co_varnames:  # 0.5.16
            host.run_scheduler_process(*launch, rank, rank, 0, 0, rank, 0, None, writer)
        else:
            host.run_scheduler_process(*launch, rank, rank, 0, None, writer)
    except BaseException:
        pipe.send((True, traceback.format_exc()))
        raise


def _cores(tp_size: int) -> list[str]:
    """Cores of each rank. A worker of pytest-xdist leaves the others' cores alone where it can."""
    cores = sorted(os.sched_getaffinity(0))
    if tp_size > 1:
        return [str(cores[rank % len(cores)]) for rank in range(tp_size)]
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker:
        return [str(cores[int(worker.removeprefix("gw")) % len(cores)])]
    return [f"{cores[0]}-{cores[-1]}"]


class _Ignore:
    """Takes the readiness message that the launcher would read."""

    def send(self, message: object) -> None:
        pass


def _serve(pipe: Any, scheduler: Any) -> None:
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((False, function(scheduler, *args)))
        except Exception:  # noqa: BLE001  the test gets it as EngineError
            pipe.send((True, traceback.format_exc()))
