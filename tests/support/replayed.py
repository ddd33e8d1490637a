"""The replay of a served model, by which tests and benchmarks see what was replayed."""

from typing import Any


def replay_of(refit: Any) -> Any:
    """Return its `Replay`; None in a package without it."""
    return next((one for one in refit.extensions if one.section == "replay"), None)
