"""What fingerprint tests run inside a scheduler (see `engine_host`)."""

from __future__ import annotations

from typing import Any

import torch
from commands import model_of, served_tensors

from sglang_fp8rl.engine.proof.all_ranks import fingerprint_of_model
from sglang_fp8rl.wire.fingerprint import Fingerprint


def fingerprint(scheduler: Any) -> Fingerprint:
    """What `GET /fp8rl/fingerprint` answers, on every rank."""
    group = scheduler.weight_updater.tp_cpu_group
    return fingerprint_of_model(model_of(scheduler).fp8rl_refit, group)


def flip(scheduler: Any, rank: int, name: str, bit: int) -> None:
    """Flip one bit of a served tensor on one rank."""
    if torch.distributed.get_rank(scheduler.weight_updater.tp_cpu_group) != rank:
        return
    served = served_tensors(scheduler)[name].detach()
    bytes_of = torch.frombuffer(
        served.untyped_storage(),
        dtype=torch.uint8,
        offset=served.storage_offset() * served.element_size(),
        count=served.numel() * served.element_size(),
    )
    bytes_of[bit // 8] ^= 1 << bit % 8
