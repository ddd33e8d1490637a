"""What an update request brings: in which formats, handed over as one bucket, or why it could not be read."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from ...errors import RefitError
from ...wire import stages
from ...wire.layout_text import from_text
from ...wire.staging import BUFFER, FLAT, NBYTES, OPEN_BUFFERS
from ...wire.verl_deltas import LOADER, deltas_refused
from ..arrival.bucket import FlatBucket
from ..refit import refit_of, wait_for


def check_load_format(load_format: str | None) -> None:
    """Refuse what would not come through `load_weights`: SGLang copies by itself, or runs a function of that name."""
    if load_format == LOADER:
        raise deltas_refused(f"load_format {LOADER}")
    if load_format not in (None, "flattened_bucket"):
        raise RefitError(
            "load_format",
            repr(load_format),
            "what writes weights past model.load_weights would leave FP8 scales behind",
            "Leave load_format out, or use 'flattened_bucket' for tensors.",
        )


def flattened_bucket(original: Callable[..., Any], updater: Any, *args: Any, **kw: Any) -> Any:
    """A flattened bucket goes to `load_weights` as it is: SGLang would take it apart first."""
    payload = args[0] if args else kw["flattened_tensor_bucket_dict"]
    model = updater.get_model()
    refit = refit_of(model)
    is_staged = NBYTES in payload
    if BUFFER in payload:
        OPEN_BUFFERS.put_memory_into(payload)
    flat = payload[FLAT]
    is_plain = flat.dtype == torch.uint8 and flat.dim() == 1 and flat.is_contiguous()
    if refit is None and isinstance(payload["metadata"], str):  # of a draft model
        payload = {**payload, "metadata": from_text(payload["metadata"])}
    try:
        if refit is None or not is_plain:
            return original(updater, payload)
        model.load_weights(FlatBucket(flat, payload["metadata"]))
        return True, "Success"
    finally:
        if is_staged:
            marks = [] if refit is None else refit.calls.update.marks
            marks.append((stages.WAITING_FOR_READS, perf_counter()))
            # The sender fills this memory again once it is answered (`StagingBuffers`).
            wait_for(flat.device)
            marks.append((stages.ANSWERING, perf_counter()))


def not_read(subject: str, error: Exception) -> RefitError:
    """What SGLang or torch raised, with a remedy."""
    _, is_unseen, uuid = str(error).partition("Invalid device_uuid=")
    if is_unseen:
        seen = [
            str(torch.cuda.get_device_properties(at).uuid)
            for at in range(torch.cuda.device_count())
        ]
        return RefitError(
            f"a handle of memory on GPU {uuid}",
            f"this rank of the server sees {', '.join(seen) or 'no GPU'}",
            "a server reads memory of the GPUs that it sees",
            "Run the trainer's rank on one of these, add the GPU to the server's CUDA_VISIBLE_DEVICES, or "
            "send tensors on the CPU; nothing of this call was stored.",
        )
    return RefitError(
        subject,
        f"{type(error).__name__}: {error}",
        "what is sent is read as SGLang's serializer writes it, a checkpoint as safetensors does",
        "Send with RefitClient or SGLang's MultiprocessingSerializer; nothing of this call is known "
        "to be stored.",
    )
