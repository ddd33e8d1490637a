"""`GET /fp8rl/fingerprint`: what is served, as one number per checkpoint name.

Like the plan it travels as the answer to an internal-state request that is marked by its `rid`, which
every rank of a scheduler's group serves; so the ranks compare and add up what they hold in it.
"""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

from ...errors import HostError
from ...wire.fingerprint import Fingerprint, compare
from ..proof.all_ranks import fingerprint_of_model
from ..refit import ModelRefit
from .internal_state import internal_states, not_served, refused
from .replicas import replica_of

logger = logging.getLogger(__name__)

_MARK = "fp8rl-fingerprint"


async def serve_fingerprint(request: Any) -> Any:
    from starlette.responses import JSONResponse

    states = await internal_states(_MARK)
    for state in states:
        if "fp8rl_fingerprint_error" in state:
            return refused(state["fp8rl_fingerprint_error"], HTTPStatus.CONFLICT)
        if "fp8rl_fingerprint" not in state:
            return not_served()
    return JSONResponse(
        of_replicas({state["replica"]: json.loads(state["fp8rl_fingerprint"]) for state in states})
    )


def of_replicas(documents: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """One document of a server's data-parallel replicas: that of rank 0, with what others differ in.

    Args:
        documents: by data-parallel rank; they answer in any order.
    """
    found = [
        Fingerprint.from_dict(document, f"dp_rank {rank}")
        for rank, document in sorted(documents.items())
    ]
    first = found[0]
    differing = dict(first.differing)
    for other in found[1:]:
        difference = compare(first, other)
        for name, text in {**difference.differing, **difference.missing}.items():
            differing.setdefault(name, text)
    return Fingerprint("server", first.numbers, differing, first.unproven).as_dict()


def fingerprint_state(refit: ModelRefit, scheduler: Any, request: Any) -> dict[str, Any] | None:
    """What the scheduler answers to a request for the fingerprint; None if `request` is none.

    The answer is text, for it is pickled between processes and large.
    """
    if (getattr(request, "rid", None) or "") != _MARK:
        return None
    try:
        _check_weights_are_there(scheduler.weight_updater)
        with refit.kv.unfolded():
            found = fingerprint_of_model(refit, scheduler.weight_updater.tp_cpu_group)
    except Exception as error:
        # The boundary of a request: a fingerprint that can't be made must not end the scheduler.
        logger.exception("fp8rl: no fingerprint")
        return {"fp8rl_fingerprint_error": str(error) or type(error).__name__}
    return {"fp8rl_fingerprint": json.dumps(found.as_dict()), "replica": replica_of(scheduler)}


def _check_weights_are_there(manager: Any) -> None:
    """Raises `HostError` while the memory of the weights is released: reading it ends the process."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    if GPU_MEMORY_TYPE_WEIGHTS in manager.offload_tags:
        raise HostError(
            "the weights",
            "their memory is released",
            "a fingerprint reads every weight",
            "Call resume_memory_occupation and send the weights first.",
        )
