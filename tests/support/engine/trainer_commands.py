"""What trainer-side tests run inside a scheduler (see `engine_host`)."""

from __future__ import annotations

from typing import Any

from support.engine.commands import model_of, plan_document


def plan(scheduler: Any) -> dict[str, Any]:
    """The document of `GET /fp8rl/plan`."""
    return plan_document(scheduler)


def stored(scheduler: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Parameter name to dtype and shape."""
    return {
        name: (str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape))
        for name, parameter in model_of(scheduler).named_parameters()
    }
