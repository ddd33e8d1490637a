"""Which tests run, on which worker, and the engines, servers and checkpoints that they share.

`@on("qwen3-tp2")` gives a test the fixture `host`: an engine on its first weights that others share. Other weights are put back
afterwards and compared; what a full update can't put back is declared with `host.in_doubt = True`. `host.fresh("second")` has bytes
and outputs of a fresh start.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Workers of pytest-xdist share the cores: one thread each. Before torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

if TYPE_CHECKING:
    from support.engine.pool import Engine, EnginePool

    from sglang_fp8rl.lab.testing.server import ServerProcess

pytest_plugins = ["support.fixtures", "support.missing_packages", "pytester"]

MAX_SERVERS = 2  # alive at a time; each takes about 1.5 GiB
HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="slow tests too, as `make test-all` does")
    parser.addoption(
        "--contract-results", type=Path, help="write what the contract suite proved to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--contract-results", default=None)
    if path is not None and not hasattr(config, "workerinput"):
        from support.engine.contract import HOST
        from support.engine.contract_table import Recorder

        config.pluginmanager.register(Recorder(path, str(HOST)), "contract-results")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out, and bring those together that share an engine, a server or a file.

    Groups stay on one worker (`--dist loadgroup`). Those that take longest come first.
    """
    if not config.getoption("--all"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
    places = {item: _place(item) for item in items}
    for item, (_, group, _) in places.items():
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=places.__getitem__)


def pytest_collection_finish() -> None:
    """What was imported stays: a test, or a refit in it, that collects garbage would look at all of it."""
    gc.collect()
    gc.freeze()


def _place(item: pytest.Item) -> tuple[int, str, str]:
    """Servers, engines, the rest; the group; the engine within it."""
    folder = item.path.relative_to(HERE).parts[0]
    engine = item.get_closest_marker("runs_on")
    if engine:
        model, key = engine.args
        return 1, f"engine {model}", key
    own = item.get_closest_marker("xdist_group")
    group = own.args[0] if own else str(item.path.relative_to(HERE))
    return ("server", "engine", "unit").index(folder), group, ""


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all checkpoints of the session."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def engine_pool(checkpoint_dir: Path) -> Iterator[EnginePool]:
    """The engines that the tests of this process share."""
    from support.engine.pool import EnginePool

    pool = EnginePool(checkpoint_dir)
    yield pool
    pool.close()


@pytest.fixture
def host(request: pytest.FixtureRequest, engine_pool: EnginePool) -> Iterator[Engine]:
    """A shared engine on its first weights; `support.engine.pool.on` says which."""
    with engine_pool.lent(request.param) as engine:
        yield engine


@pytest.fixture(scope="session")
def dense_checkpoint(checkpoint_dir: Path) -> Path:
    """A small Qwen3 in FP32, in two shards."""
    from sglang_fp8rl.lab.testing.checkpoints import make_checkpoint

    return make_checkpoint(checkpoint_dir / "qwen3", "qwen3", shards=2)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ServerProcess]]:
    """`server(checkpoint, *args)`: a running server, reused by every test that asks for the same.

    A test that changes weights puts them back, or gives a flag of its own (`--random-seed=…`).
    The server longest unused is stopped when there would be more than `MAX_SERVERS`.
    """
    from support.engine.forked_server import ForkedServer

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
            found = ForkedServer(checkpoint, args, log_path=log, env=env).start()
        alive[key] = found
        return found

    yield get
    for process in alive.values():
        process.stop()


def _flat(env: dict[str, Any] | None) -> Sequence[str]:
    return [f"{name}={value}" for name, value in sorted((env or {}).items())]
