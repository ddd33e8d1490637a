"""veRL's SGLang rollout where veRL and a supported SGLang disagree. Imported when it is used."""

from __future__ import annotations

from typing import Any

SERVED_ACTOR = f"{__name__}.served_actor"


def trains_what_is_served(model_config: Any) -> bool:
    """Whether a model names the served actor, whose import changes veRL. veRL takes a name, or several."""
    names = getattr(model_config, "external_lib", None) or ()
    return SERVED_ACTOR in ([names] if isinstance(names, str) else names)
