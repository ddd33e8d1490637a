"""`GET /fp8rl/fingerprint`: what is served, as one number per checkpoint name.

Every rank of a scheduler's group serves the request, so they compare and add up what they hold in it.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from ...wire.fingerprint import FINGERPRINT_PATH, Fingerprint, compare
from ..extension import Extension
from ..host.boundary import Boundary
from ..host.request_checks import check_weights_are_there
from ..host.status import internal_states, not_served, refused, replica_of
from ..refit import ModelRefit
from .served import Rank, fingerprint_of_ranks, rank_of

FINGERPRINT_MARK = "fp8rl-fingerprint"
_ANSWER, _ERROR = "fp8rl_fingerprint", "fp8rl_fingerprint_error"


async def serve_fingerprint(request: Any) -> Any:
    """It makes derived weights anew: for those who may change the server."""
    from starlette.responses import JSONResponse

    states = await internal_states(FINGERPRINT_MARK)
    for state in states:
        if _ERROR in state:
            return refused(state[_ERROR], HTTPStatus.CONFLICT)
        if _ANSWER not in state:
            return not_served()
    return JSONResponse(
        of_replicas({state["replica"]: json.loads(state[_ANSWER]) for state in states})
    )


def of_replicas(documents: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """One document of a server's data-parallel replicas: that of rank 0, with what others differ in.

    Args:
        documents: by data-parallel rank; they answer in any order.
    """
    first, *others = (
        Fingerprint.from_dict(document, f"dp_rank {rank}")
        for rank, document in sorted(documents.items())
    )
    differing, unproven = dict(first.differing), dict(first.unproven)
    for other in others:
        difference = compare(first, other)
        for name, text in {**difference.differing, **difference.missing}.items():
            differing.setdefault(name, text)
        for name, text in other.unproven.items():
            unproven.setdefault(name, f"{other.source}: {text}")
    numbers = {name: one for name, one in first.numbers.items() if name not in unproven}
    return Fingerprint("server", numbers, differing, unproven).as_dict()


class Fingerprints(Extension):
    """Answers what its model holds."""

    routes = {FINGERPRINT_PATH: serve_fingerprint}  # noqa: RUF012
    mark = FINGERPRINT_MARK

    def answer(self, scheduler: Any) -> dict[str, Any]:
        boundary = Boundary(scheduler.weight_updater.tp_cpu_group)
        own = boundary.step(_read, self.refit, scheduler.weight_updater)
        ranks = boundary.gathered(own or Rank(error=" | ".join(boundary.errors)))
        return boundary.step(_answer, ranks, scheduler) or {_ERROR: " | ".join(boundary.errors)}


def _read(refit: ModelRefit, manager: Any) -> Rank:
    """What this rank has to say. Raises `HostError` while the weights' memory is released."""
    check_weights_are_there(manager, "a fingerprint reads every weight")
    return rank_of(refit)


def _answer(ranks: list[Rank], scheduler: Any) -> dict[str, Any]:
    """As text, for it is pickled between processes and large."""
    found = fingerprint_of_ranks(ranks)
    return {_ANSWER: json.dumps(found.as_dict()), "replica": replica_of(scheduler)}
