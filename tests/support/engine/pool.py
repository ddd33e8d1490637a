"""Engines that tests share: one for each model, layout and arguments, on its first weights.

A test gets an engine that holds the bytes of a fresh load and has seen no bucket yet, whichever
tests ran before it, and may change its weights: afterwards the first ones are put back by a full
update and their bytes compared with those of the load. A test after which that proves nothing says
so (`in_doubt`), and the engine is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_fp8rl.versions import HAS_SESSIONS
from support.engine.commands import digests, forget_buckets, status
from support.engine.contract import LAYOUTS, Layout, no_forward_of
from support.engine.engine_host import EngineHost
from support.engine.generation import NEW_TOKENS, PROMPT, generate
from support.engine.models import MODELS, Model, checkpoint

MAX_RANKS = 4  # alive at a time; each takes about 1 GiB

needs_sessions = pytest.mark.skipif(not HAS_SESSIONS, reason="this SGLang has no sessions")

# -- which engine a test runs on -------------------------------------------------------------------


@dataclass(frozen=True)
class EngineKey:
    """What makes two engines the same; `label` names the arguments in a test's id."""

    model: Model
    layout: Layout
    args: tuple[str, ...] = ()
    label: str = ""
    radix_cache: bool = False

    def __str__(self) -> str:
        return "-".join(filter(None, (self.model.name, self.layout.name, self.label)))


def engine_key(
    model: str | Model,
    layout: str = "tp1",
    args: tuple[str, ...] = (),
    label: str = "",
    *,
    radix_cache: bool = False,
) -> EngineKey:
    """By the names of `models.MODELS` and `contract.LAYOUTS`."""
    found = model if isinstance(model, Model) else MODELS[model]
    return EngineKey(found, LAYOUTS[layout], args, label, radix_cache)


def on(*keys: EngineKey | str, slow: tuple[EngineKey | str, ...] = ()) -> pytest.MarkDecorator:
    """Run a test with the fixture `host` on each of these engines; on the `slow` ones in `test-all`.

    A string is a model and a layout, as in `"qwen3-tp2"`.
    """
    params = [as_param(key) for key in keys] + [as_param(key, pytest.mark.slow) for key in slow]
    return pytest.mark.parametrize("host", params, indirect=True)


def as_param(key: EngineKey | str, *marks: Any) -> Any:
    """A parameter of `host`. Its mark tells `conftest.py` which tests run beside each other."""
    if isinstance(key, str):
        model, _, layout = key.rpartition("-")
        key = engine_key(model, layout)
    return pytest.param(key, id=str(key), marks=[runs_on(key.model.name, str(key)), *marks])


def runs_on(model: str, engine: str = "") -> pytest.MarkDecorator:
    """For a test that takes engines of this model from the pool by itself."""
    return pytest.mark.runs_on(model, engine)


# -- the engines -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fresh:
    """What an engine has and says right after it was started on a checkpoint, by rank.

    Attributes:
        said: `generate(PROMPT, NEW_TOKENS)`; None where the CPU platform can't run the model.
    """

    digests: list[dict[str, str]]
    status: list[dict[str, Any]]
    said: list[Any] | None


class Engine(EngineHost):
    """A shared engine; `in_doubt` means that it is not used again."""

    def __init__(self, key: EngineKey, which: str, pool: EnginePool) -> None:
        self.key, self.model, self._pool = key, key.model, pool
        self.in_doubt = False
        path = pool.checkpoint(key.model, which)
        super().__init__(
            path,
            tp_size=key.layout.tp_size,
            args=(*key.layout.args, *key.args),
            radix_cache=key.radix_cache,
        )
        # Generates before it is updated, as a server does: SGLang keeps copies of some weights from
        # their first use on.
        said = None if no_forward_of(key.model.name, key.layout) else self.say()
        self.as_loaded = Fresh(self.call_all(digests), self.call_all(status), said)

    def fresh(self, which: str = "second") -> Fresh:
        """Of an engine of the same key that was started on these weights."""
        return self.as_loaded if which == "first" else self._pool.fresh(self.key, which)

    def check_fresh(self, which: str) -> None:
        """Bytes and words are those of an engine that was started on these weights."""
        fresh = self.fresh(which)
        assert self.call_all(digests) == fresh.digests
        assert self.say() == fresh.said

    def say(self) -> list[Any]:
        return self.call_all(generate, PROMPT, NEW_TOKENS)

    def update_to(self, *which: str) -> None:
        """Full updates to these weight sets, one after the other."""
        for one in which:
            self.send(list(getattr(self.model, one).items()))

    def restore(self) -> None:
        """Put the first weights back, unless they are there and whole, and check their bytes.

        Behind every test: whatever it did, one full update mends it.
        """
        if self._is_as_loaded():
            return
        self.send(list(self.model.first.items()))
        assert self._is_as_loaded(), self.call(status)["problems"]

    def _is_as_loaded(self) -> bool:
        ranks = self.call_all(status)
        as_loaded = self.call_all(digests) == self.as_loaded.digests
        return as_loaded and all(rank["consistent"] and not rank["problems"] for rank in ranks)


class EnginePool:
    """At most `MAX_RANKS` ranks; the engine longest unused is stopped first.

    Args:
        directory: of the checkpoints.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._engines: dict[EngineKey, Engine] = {}
        self._fresh: dict[tuple[EngineKey, str], Fresh] = {}

    def checkpoint(self, model: Model, which: str) -> Path:
        return checkpoint(self._directory, model, which)

    def fresh(self, key: EngineKey, which: str = "second") -> Fresh:
        """What a fresh engine of this key has and says; started once for all tests."""
        if (key, which) not in self._fresh:
            self._make_room(key.layout.tp_size)
            with Engine(key, which, self) as engine:
                self._fresh[key, which] = engine.as_loaded
        return self._fresh[key, which]

    @contextmanager
    def lent(self, key: EngineKey) -> Iterator[Engine]:
        """The engine of this key for one test."""
        engine = self._engines.pop(key, None)
        if engine is None:
            self._make_room(key.layout.tp_size)
            engine = Engine(key, "first", self)
        try:
            engine.call_all(forget_buckets)
            yield engine
            engine.in_doubt |= engine.is_stuck
            if not engine.in_doubt:
                engine.restore()
        except BaseException:
            engine.in_doubt = True
            raise
        finally:
            if engine.in_doubt:
                engine.close()
            else:
                self._engines[key] = engine

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _make_room(self, ranks: int) -> None:
        while self._engines and ranks + sum(e.tp_size for e in self._engines.values()) > MAX_RANKS:
            self._engines.pop(next(iter(self._engines))).close()
