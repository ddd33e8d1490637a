"""What a recipe says where its trainer, or this package, is not there."""

from __future__ import annotations

import importlib.util

THIS_PACKAGE = "pip install --no-deps . in a checkout of sglang-fp8rl"


def need(module: str, install: str) -> None:
    """Leave with one line that says what to install, unless `module` can be imported."""
    if importlib.util.find_spec(module) is None:
        raise SystemExit(
            f"error: {module} is not installed; this recipe runs it. Install: {install}"
        )
