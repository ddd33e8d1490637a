"""What tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def with_strides(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """On the device, with its strides and with what lies around it."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    around = tensor.as_strided((size,), (1,), 0).to(device)
    return around.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
