"""The recipes of a served model, by which tests see what was replayed."""

from typing import Any


def recipes_of(refit: Any) -> Any:
    """Return its `RecipeStore`; None in a package without replay."""
    found = (one.recipes for one in refit.extensions if one.section == "replay")
    return next(found, None)
