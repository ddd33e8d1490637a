"""The replay of a served model, by which tests and benchmarks see what was replayed."""

from typing import Any


def replay_of(refit: Any) -> Any:
    """Return its extension; None in a package without replay."""
    return next((one for one in refit.extensions if one.section == "replay"), None)


def recipes_of(refit: Any) -> Any:
    """Return its `RecipeStore`; None in a package without replay."""
    replay = replay_of(refit)
    return None if replay is None else replay.recipes
