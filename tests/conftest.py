"""Servers and checkpoints shared by the tests of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sglang_fp8rl.testing.checkpoints import make_checkpoint
from sglang_fp8rl.testing.server import ServerProcess

MAX_SERVERS = 2  # alive at a time; each takes about 1.5 GiB

ServerFactory = Callable[..., ServerProcess]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--contract-results", type=Path, help="write what the contract suite proved to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--contract-results", default=None)
    if path is not None:
        from contract import HOST
        from contract_table import Recorder

        config.pluginmanager.register(Recorder(path, str(HOST)), "contract-results")


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all checkpoints of the session."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def dense_checkpoint(checkpoint_dir: Path) -> Path:
    """A small Qwen3 in FP32, in two shards."""
    return make_checkpoint(checkpoint_dir / "qwen3", "qwen3", shards=2)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFactory]:
    """`server(checkpoint, *args)`: a running server, reused by every test that asks for the same.

    A test that changes weights puts them back, or gives a flag of its own (`--random-seed=…`).
    The server longest unused is stopped when there would be more than `MAX_SERVERS`.
    """
    alive: dict[tuple[str, ...], ServerProcess] = {}
    logs = tmp_path_factory.mktemp("servers")

    def get(checkpoint: Path, *args: str, env: dict[str, str] | None = None) -> ServerProcess:
        key = (str(checkpoint), *args, *_flat(env))
        found = alive.pop(key, None)
        if found is not None and not found.alive():
            found.stop()
            found = None
        while found is None and len(alive) >= MAX_SERVERS:
            alive.pop(next(iter(alive))).stop()
        if found is None:
            log = logs / f"server-{len(list(logs.iterdir()))}.log"
            found = ServerProcess(checkpoint, args, log_path=log, env=env).start()
        alive[key] = found
        return found

    yield get
    for process in alive.values():
        process.stop()


def _flat(env: dict[str, str] | None) -> Sequence[str]:
    return [f"{name}={value}" for name, value in sorted((env or {}).items())]
