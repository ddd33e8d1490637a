"""What an update request may not ask for, refused before a byte of it is read."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import HostError, RefitError
from ...wire.verl_deltas import LOADER, deltas_refused


def check_request(manager: Any, request: Any) -> None:
    """Raises `RefitError` for a request that can't be served as it is meant."""
    check_weights_are_there(manager, "an update writes them")
    load_format = getattr(request, "load_format", None)
    if load_format == "direct":
        raise RefitError(
            "load_format",
            "'direct'",
            "it copies into parameters and would leave FP8 scales behind",
            "Leave load_format out, or use 'flattened_bucket'.",
        )
    if load_format == LOADER:
        raise deltas_refused(f"load_format {LOADER}")
    check_selector(manager, request)
    payloads = getattr(request, "serialized_named_tensors", None)
    size = torch.distributed.get_world_size(manager.tp_cpu_group)
    if payloads is not None and len(payloads) != size:
        raise RefitError(
            "serialized_named_tensors",
            f"{len(payloads)} payload(s)",
            f"there is one for each of the {size} tensor-parallel rank(s)",
            "Send as many as the server's tp_size; RefitClient asks for it.",
        )


def are_weights_released(manager: Any) -> bool:
    """Whether `release_memory_occupation` took their memory: touching it ends the process."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    return GPU_MEMORY_TYPE_WEIGHTS in manager.offload_tags


def check_weights_are_there(manager: Any, rule: str) -> None:
    """Raises `HostError` while the memory of the weights is released."""
    if are_weights_released(manager):
        raise HostError(
            "the weights",
            "their memory is released",
            rule,
            "Call resume_memory_occupation first, then send all weights.",
        )


def check_selector(manager: Any, request: Any) -> None:
    """Raises `RefitError` where nothing would be updated, which SGLang answers with success."""
    if getattr(request, "selector", "all") == "draft" and manager.draft_worker is None:
        raise RefitError(
            "selector",
            "'draft'",
            "this server has no draft model: nothing would be updated",
            "Leave selector out, or start the server with a draft model.",
        )
