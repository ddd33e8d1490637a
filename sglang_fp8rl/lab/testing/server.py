"""A real SGLang server in a process group of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests

from ...compat import CPU_PLATFORM
from ...errors import HostError
from .ports import free_port
from .start_failure import cause_of, is_address_in_use

if TYPE_CHECKING:
    from typing_extensions import Self

# The smallest set that starts. --skip-server-warmup saves a generation of SGLang's own,
# --skip-tokenizer-init lets checkpoints have no tokenizer (requests carry input_ids), and without
# --sleep-on-idle every idle server keeps a core busy.
BASE_ARGS = (
    "--host=127.0.0.1",
    "--skip-tokenizer-init",
    "--skip-server-warmup",
    "--sleep-on-idle",
    "--log-level=info",
)
PORTS_TRIED = 3


def attention_args() -> tuple[str, ...]:
    """Flags for a server on a GPU: the Triton backend where `sgl_kernel` came without FlashAttention-3.

    On Hopper SGLang chooses FlashAttention-3 and finds out at the first request. The offline bundle
    leaves it out.
    """
    spec = importlib.util.find_spec("sgl_kernel")
    for package in map(Path, (spec and spec.submodule_search_locations) or ()):
        loader = package / "flash_attn.py"
        wants_it = loader.exists() and "flash_ops" in loader.read_text()
        if wants_it and not any(package.glob("flash_ops*")):
            return ("--attention-backend=triton",)
    return ()


class _PortTakenError(HostError):
    """Something else had bound a port by the time the server wanted it."""


class ServerProcess:
    """`python -m sglang.launch_server` in a process group of its own; a context manager.

    Args:
        args: more flags of `launch_server`, e.g. `("--tp-size=2",)`.
        log_path: takes stdout and stderr.
        timeout: seconds until the server must be healthy.
        on_gpu: otherwise on the CPU platform, with workers that share the launcher's imports (see `launch`),
            which starts much faster.
    """

    def __init__(
        self,
        model_path: str | Path,
        args: Sequence[str] = (),
        *,
        log_path: str | Path,
        env: dict[str, str] | None = None,
        timeout: float = 420,
        on_gpu: bool = False,
    ) -> None:
        self.log_path, self.timeout = Path(log_path), timeout
        launcher = "sglang.launch_server" if on_gpu else "sglang_fp8rl.lab.testing.launch"
        self.command = [sys.executable, "-m", launcher, f"--model-path={model_path}"]
        self.command += [*BASE_ARGS, *args, *(attention_args() if on_gpu else ())]
        self._use_port(free_port())
        platform = {} if on_gpu else cpu_env(_tp_size(args))
        self.env = {**os.environ, **platform, **(env or {})}
        self.start_seconds = float("nan")
        self._process: Any = None

    def start(self) -> Self:
        """Start and wait until `/health` answers, on another port where this one was taken meanwhile.

        Raises:
            HostError: it ended, or was not healthy in time; with the first error in its log.
        """
        for _ in range(PORTS_TRIED - 1):
            with contextlib.suppress(_PortTakenError):
                return self._start()
            self._use_port(free_port())
        return self._start()

    def _use_port(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        rest = [word for word in self.command if not word.startswith("--port=")]
        self.command = [*rest, f"--port={port}"]

    def _start(self) -> Self:
        began = time.monotonic()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._process = self._launch()
        while not self._healthy():
            if not self.alive():
                self._fail(f"exited with {self._process.returncode} before it was healthy")
            if time.monotonic() - began > self.timeout:
                self._fail(f"not healthy after {self.timeout:.0f} s")
            time.sleep(0.2)
        self.start_seconds = time.monotonic() - began
        return self

    def _launch(self) -> Any:
        """The launcher, leader of a process group of its own, its output in the log: a `Popen`."""
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                self.command, env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self) -> None:
        """Kill the whole process group: launcher, schedulers, detokenizer."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # gone already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    @property
    def pid(self) -> int:
        """Of the launcher, whose children are the other processes."""
        assert self._process is not None, "not started"
        return self._process.pid

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def post(self, path: str, payload: Any = None, *, timeout: float = 120) -> Any:
        """POST JSON; the answer as JSON, or text. One that is not 2xx is an error with its body."""
        response = requests.post(self.url + path, json=payload or {}, timeout=timeout)
        if not response.ok:
            raise HostError(
                f"POST {path}", f"{response.status_code} {response.text}", "2xx expected", ""
            )
        is_json = "json" in response.headers.get("content-type", "")
        return response.json() if is_json else response.text

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _healthy(self) -> bool:
        try:
            return requests.get(self.url + "/health", timeout=5).ok
        except (requests.ConnectionError, requests.Timeout):
            return False

    def _fail(self, what: str) -> None:
        self.stop()
        log = self.log_path.read_text(errors="replace")
        kind = _PortTakenError if is_address_in_use(log) else HostError
        raise kind(" ".join(self.command), what, cause_of(log), f"See {self.log_path}.")


def cpu_env(tp_size: int = 1) -> dict[str, str]:
    """Environment of a server on the CPU platform: no GPU seen, one core per rank."""
    env = {"SGLANG_PLATFORM": CPU_PLATFORM, "CUDA_VISIBLE_DEVICES": ""}
    if tp_size > 1:
        cores = sorted(os.sched_getaffinity(0))
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in range(tp_size)
        )
    return env


def _tp_size(args: Sequence[str]) -> int:
    words = [word for arg in args for word in arg.split("=", 1)]
    flags = ("--tp-size", "--tp", "--tensor-parallel-size")
    found = [int(after) for word, after in itertools.pairwise(words) if word in flags]
    return found[-1] if found else 1
