"""What the server tests share: one running server, what a fresh engine says, and ways to send."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.client.connection import Connection
from sglang_fp8rl.lab.testing.outputs import Output, ask, differences, make_prompts
from sglang_fp8rl.lab.testing.server import ServerProcess, cpu_env
from sglang_fp8rl.versions import HAS_SESSIONS as HAS_SESSIONS
from support.engine.forked import WithoutPlugins, run_forked
from support.engine.models import MODELS, Model, checkpoint
from support.paths import python_path

MODEL: Model = MODELS["qwen3"]
PROMPTS = make_prompts(MODEL.config.vocab_size)[1::2]
NEW_TOKENS = 4  # the log-probabilities of the prompt tokens say more, and come at once
QUANTIZED = "--quantization=fp8_blockwise_online"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # the products are small; results don't depend on it

Outputs = list[Output]


class Client(RefitClient):
    """Opens sessions where the host has them; asks for few tokens."""

    def generate(self, input_ids: Any, max_new_tokens: int = NEW_TOKENS, **options: Any) -> Any:
        return super().generate(input_ids, NEW_TOKENS, **options)


class ClientWithoutSessions(Client):
    """A trainer that knows no sessions, as veRL: every call stands for itself."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._connection = _WithoutSessions(url, timeout=600)


class _WithoutSessions(Connection):
    def post_if_known(self, path: str, body: dict[str, Any]) -> bool:
        return False


@dataclass(frozen=True)
class EngineRun:
    """What `engine_script.py` printed.

    Attributes:
        fresh: outputs of an engine started on the second weights.
        updated: its outputs after an update to the first, over the Python API.
        status: the section `fp8rl` after either.
        answers: what the update call returned.
    """

    fresh: Outputs
    updated: Outputs
    status: list[dict[str, Any]]
    answers: list[Any]


@functools.cache
def engine_run(checkpoint_dir: Path) -> EngineRun:
    """An `sglang.Engine` started on the second weights: the oracle of every refit to them."""
    log = checkpoint_dir / "engine.log"
    paths, env = engine_paths(checkpoint_dir), cpu_env()
    how = run_forked(_engine_in_a_fork, paths, log, env=env, process_class=WithoutPlugins)
    assert how == "exit status 0", log.read_text()[-4000:]
    return read_engine_run(log.read_text())


def engine_paths(checkpoint_dir: Path) -> list[str]:
    """Arguments of `engine_script.py`."""
    return [str(checkpoint(checkpoint_dir, MODEL, which)) for which in ("second", "first")]


def _engine_in_a_fork(*paths: str) -> None:
    """The script in a process that has SGLang imported, and so have its workers."""
    from sglang_fp8rl.lab.testing.launch import fork_workers
    from support.server import engine_script

    fork_workers()
    engine_script.main(*paths)


def read_engine_run(output: str) -> EngineRun:
    """What the script printed."""
    said = json.loads(output.splitlines()[-1])
    for key in ("fresh", "updated"):
        said[key] = [Output(tuple(tokens), tuple(logprobs)) for tokens, logprobs in said[key]]
    return EngineRun(**said)


@dataclass(frozen=True)
class Served:
    """A server on the first weights, and what either weight set has to give.

    Attributes:
        server: the process.
        client: opens sessions where the host has them.
        expected: weight set to outputs.
    """

    server: ServerProcess
    client: RefitClient
    expected: dict[str, Outputs]

    def ask(self) -> Outputs:
        return ask(self.client, PROMPTS)

    def check(self, which: str) -> None:
        """Outputs are those of a fresh server, and the status says that all is well."""
        assert differences(self.ask(), self.expected[which]) == []
        state = self.client.status()
        assert state["consistent"], state["problems"]
        assert state["problems"] == []
        assert state["last_refit"]["outcome"] == "ok"
        assert state["last_refit"]["complete"]

    def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON of an answer, whatever it is."""
        import requests

        response = requests.post(self.server.url + path, json=body or {}, timeout=300)
        return response.status_code, response.json()


_first_outputs: dict[str, Outputs] = {}


def served(server: Callable[..., ServerProcess], checkpoint_dir: Path) -> Served:
    """The one server at TP=1 that the test files share."""
    second = engine_run(checkpoint_dir).fresh
    running = server(checkpoint(checkpoint_dir, MODEL, "first"), QUANTIZED, env=ONE_THREAD)
    client = Client(running.url)
    if running.url not in _first_outputs:
        _first_outputs[running.url] = ask(client, PROMPTS)
    return Served(running, client, {"first": _first_outputs[running.url], "second": second})


def weights(which: str, dtype: torch.dtype | None = None) -> list[tuple[str, torch.Tensor]]:
    """One weight set as a trainer sends it."""
    state = getattr(MODEL, which)
    return [(name, tensor if dtype is None else tensor.to(dtype)) for name, tensor in state.items()]


def run_script(
    args: Sequence[str], *, env: dict[str, str] | None = None, timeout: float = 1000
) -> subprocess.CompletedProcess[str]:
    """A Python program in a process group of its own, gone afterwards whatever it started."""
    process = subprocess.Popen(
        [sys.executable, *args],
        env={**os.environ, "PYTHONPATH": python_path(), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        kill_group(process)
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):  # gone already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def first_weights_afterwards(case: Served) -> Iterator[None]:
    """Put the first weights back, and check that the server says they are whole."""
    try:
        yield
    finally:
        ClientWithoutSessions(case.server.url).update(weights("first"))
        case.check("first")
