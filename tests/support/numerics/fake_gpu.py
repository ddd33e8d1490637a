"""Triton's launches without a GPU: compiled for sm_90 as they are on one, counted, and not run.

What a launcher does on the host shows: which torch operations it takes, and how many launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from sglang_fp8rl.numerics import backends

_NUMBER = -1  # of a device that no real one has, so that nobody else meets what is compiled here


class _Utils:
    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        return "module", "function", 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class FakeDriver:
    """What Triton asks a driver.

    Attributes:
        launches: of each its grid, and a hash of what was compiled.
    """

    def __init__(self) -> None:
        self.launches: list[SimpleNamespace] = []
        self.utils = _Utils()

    def get_current_device(self) -> int:
        return _NUMBER

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(*arguments: Any) -> None:
            here: Any = triton.runtime.driver.active  # what another of these compiled is kept
            here.launches.append(SimpleNamespace(grid=arguments[:3], compiled=metadata.hash))

        return launch


@contextmanager
def fake_gpu() -> Iterator[FakeDriver]:
    """Launches go nowhere, and are noted."""
    config = triton.runtime.driver
    before, found = config._active, FakeDriver()
    config.set_active(found)
    try:
        with patch.dict(backends._DEVICES, triton=("cuda", "cpu")):
            yield found
    finally:
        config._active = before


class Operations(TorchDispatchMode):
    """The torch operations that were done, by name; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.done.append(str(func))
        return func(*args, **(kwargs or {}))
