"""Many tensors copied to their places in one memory: in few calls, which alone keep up with a GPU where tensors are small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Torch's fast kernel counts in 32 bits: so many bytes are 2 GiB, so many words 16.
_WORD = torch.int64


def place_of(memory: torch.Tensor, meta: Any) -> torch.Tensor:
    """Where a `flat_tensor` lies."""
    return memory[meta.start_idx : meta.end_idx].view(meta.dtype).view(meta.shape)


def copy_together(memory: torch.Tensor, tensors: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Copy tensors (that need no gradient) to the places of their `flat_tensor`s in uint8 `memory`, each behind the one before.
    Those that are whole words, with no gap between them, are one call; any other is one by itself."""
    row: list[torch.Tensor] = []
    begin = end = 0

    def copy_row() -> None:
        if row:
            torch.cat(row, out=memory[begin:end].view(_WORD))
            row.clear()

    for meta, tensor in tensors:
        words = _words_of(tensor) if tensor.device == memory.device else None
        if words is None or meta.start_idx != end:
            copy_row()
            begin = meta.start_idx
        end = meta.end_idx
        if words is not None:
            row.append(words)
        else:
            place_of(memory, meta).copy_(tensor)
            begin = end
    copy_row()


def _words_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What lies in a tensor's memory, as a row of words; None where its values lie otherwise."""
    is_raw = type(tensor) is torch.Tensor and not (tensor.is_neg() or tensor.is_conj())
    starts = tensor.data_ptr() | tensor.storage_offset() * tensor.itemsize
    if not (is_raw and tensor.is_contiguous()) or (starts | tensor.nbytes) % _WORD.itemsize:
        return None
    return tensor.as_strided((tensor.numel(),), (1,)).view(_WORD)  # one element may have any stride
