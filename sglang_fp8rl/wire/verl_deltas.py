"""veRL's `delta_sharded` wire format, which is refused by name: by the server, and by veRL's adapter."""

from __future__ import annotations

from typing import Any

from ..config import QUANTIZATION_METHOD
from ..errors import RefitError

BACKEND = "delta_sharded"  # of `rollout.checkpoint_engine`
WIRE_FORMAT = "delta_flush"  # what that backend calls its flushes
LOADER = "verl.workers.rollout.sglang_rollout.delta_loader.apply_delta"


def deltas_refused(subject: str) -> RefitError:
    """The reason, where `subject` asks for them."""
    return RefitError(
        subject,
        f"veRL's {BACKEND}: the elements that changed, NaN at all others",
        "FP8 is cast from whole blocks, not from the elements of one that changed; and its verify "
        "flush writes what it compares and sees no FP8 weight, so it would prove nothing",
        "Set rollout.checkpoint_engine.backend to naive, nccl or nixl, which send whole tensors; "
        "GET /fp8rl/fingerprint proves them.",
    )


def asks_for_this(config: Any) -> bool:
    """Whether veRL's config of a rollout asks for this package's method."""
    asked_for = (config.get("engine_kwargs") or {}).get("sglang") or {}
    return asked_for.get("quantization") == QUANTIZATION_METHOD


def check_backend(config: Any) -> None:
    """Raises `RefitError` for a rollout of this method that would be sent deltas, before it starts."""
    backend = (config.get("checkpoint_engine") or {}).get("backend")
    if backend == BACKEND and asks_for_this(config):
        raise deltas_refused("rollout.checkpoint_engine.backend")
