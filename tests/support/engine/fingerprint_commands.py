"""What fingerprint tests run inside a scheduler (see `engine_host`)."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fp8rl.engine.host.boundary import Boundary
from sglang_fp8rl.engine.proof.extension import Fingerprints, fingerprint_of_ranks
from sglang_fp8rl.wire.fingerprint import Fingerprint
from support.engine.commands import model_of, served_tensors


def fingerprint(scheduler: Any) -> Fingerprint:
    """What `GET /fp8rl/fingerprint` answers, on every rank."""
    group = scheduler.weight_updater.tp_cpu_group
    own = Fingerprints(model_of(scheduler).fp8rl_refit).rank()
    return fingerprint_of_ranks(Boundary(group).gathered(own))


def fingerprint_after_flip(scheduler: Any, rank: int, name: str, bit: int) -> Fingerprint:
    """The fingerprint while one bit of a served tensor is flipped on one rank."""
    is_here = torch.distributed.get_rank(scheduler.weight_updater.tp_cpu_group) == rank
    if is_here:
        _flip(served_tensors(scheduler)[name].detach(), bit)
    found = fingerprint(scheduler)
    if is_here and name in dict(model_of(scheduler).named_parameters()):
        _flip(served_tensors(scheduler)[name].detach(), bit)
    return found


def _flip(served: torch.Tensor, bit: int) -> None:
    whole = served.as_strided(
        (served.untyped_storage().nbytes() // served.element_size(),), (1,), 0
    )
    at = served.storage_offset() * served.element_size() + bit // 8
    whole.view(torch.uint8)[at] ^= 1 << bit % 8


def names_by_parameter(scheduler: Any) -> dict[str, tuple[int, set[str]]]:
    """Parameter, or the scale of one, to its bits and the checkpoint names that are stored there."""
    refit = model_of(scheduler).fp8rl_refit
    sizes = {name: 8 * p.nbytes for name, p in model_of(scheduler).named_parameters()}
    scales = {id(p): name for name, p in model_of(scheduler).named_parameters()}
    found: dict[str, tuple[int, set[str]]] = {}
    for name, known in refit.names.known.items():
        for landing in known.landings:
            places = [landing.target.name]
            if landing.target.scale is not None:
                places.append(scales[id(landing.target.scale)])
            for place in places if landing.boxes else ():
                found.setdefault(place, (sizes[place], set()))[1].add(name)
    return found
