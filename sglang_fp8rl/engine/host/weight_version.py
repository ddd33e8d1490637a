"""SGLang's `weight_version` moves when a refit is whole, not with its first bucket.

SGLang takes the version of every call that succeeds. Here it goes to the scheduler out of SGLang's sight, behind `rid`,
and comes back behind the answer's message (`RequestEnd`) where the refit that it names was the last step to weights of
one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...config import QUANTIZATION_METHOD
from ...wire.refit_note import apart_from_versions, with_version


async def with_whole_version(
    original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kw: Any
) -> Any:
    """`TokenizerManager.update_weights_from_*` and `end_weight_update`: SGLang's answer, and what became of the version."""
    if manager.model_config.quantization != QUANTIZATION_METHOD:
        return await original(manager, request, *args, **kw)
    version = getattr(request, "weight_version", None)  # the end of a session has none
    if version is not None:
        request.rid, request.weight_version = with_version(request.rid, version), None
    success, message, *more = await original(manager, request, *args, **kw)
    message, moved = apart_from_versions(message)
    # Replicas that differ are of no version; one that was left behind says none, or fails the answer of them all.
    are_alike = len(set(moved)) == 1 and (success or len(moved) == manager.server_args.dp_size)
    if are_alike and (new := moved[0]) is not None:
        manager._update_weight_version_if_provided(new)
        message += f" Weight version updated to {new}."
    return (success, message, *more)
