"""Where things lie, for processes that a test starts."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent
BENCHMARKS = REPOSITORY / "benchmarks"
SUPPORT = TESTS / "support"


def python_path(*more: Path | str) -> str:
    """Return a `PYTHONPATH` with `support` and these, in front of the given one."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, more), str(TESTS), *([given] if given else [])])
