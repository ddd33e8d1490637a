"""SGLang's `weight_version` moves when a refit is whole, not with its first bucket.

SGLang takes the version of every call that succeeds. Here it goes to the scheduler out of SGLang's sight, in `rid`, and
comes back where the refit that it names was the last step to weights of one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...config import QUANTIZATION_METHOD
from ...wire.refit_note import with_version
from .status import VERSION_MARK, internal_states


async def with_whole_version(
    original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kw: Any
) -> Any:
    """`TokenizerManager.update_weights_from_*` and `end_weight_update`: SGLang's answer, and what became of the version."""
    ends_session = not hasattr(request, "weight_version")
    version = None if ends_session else request.weight_version
    is_served = manager.model_config.quantization == QUANTIZATION_METHOD
    if not is_served or (version is None and not ends_session):
        return await original(manager, request, *args, **kw)
    if version is not None:
        request.rid, request.weight_version = with_version(request.rid, version), None
    return await _followed(manager, await original(manager, request, *args, **kw))


async def _followed(manager: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """The answer `(success, message, …)`, behind which SGLang's version is that of what is served."""
    states = await internal_states(VERSION_MARK, manager)
    found = {state.get("fp8rl_version") for state in states}
    version = found.pop() if len(found) == 1 else None  # replicas that differ are of no version
    if version is None:
        return answer
    manager._update_weight_version_if_provided(version)
    success, message, *more = answer
    return (success, f"{message} Weight version updated to {version}.", *more)
