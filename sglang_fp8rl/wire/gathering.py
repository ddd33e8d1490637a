"""Many tensors copied to their places in one memory: in few calls, which alone keep up with a GPU where tensors are small."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Types that have nothing but their elements, in memory of their own.
PLAIN: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
# Torch's fast kernel counts in 32 bits: so many bytes are 2 GiB, so many words 16. It takes these as they are, too.
_WORD, _WIDE = torch.int64, (torch.float32, torch.bfloat16, torch.float16)
_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")


def place_of(
    memory: torch.Tensor, start: int, dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    """Where a tensor lies that starts at that byte of uint8 memory."""
    end = start + shape.numel() * dtype.itemsize
    return memory[start:end].view(dtype).view(shape)


def copy_together(
    memory: torch.Tensor, starts: Sequence[int], tensors: Sequence[torch.Tensor]
) -> None:
    """Copy tensors to where they start in uint8 `memory`, each behind the one before, at multiples of a word. Those that are
    whole words, with no gap between them, are one call; any other is one by itself."""
    if not tensors:
        return
    begins, sizes = np.array(starts, np.int64), nbytes_of(tensors)
    ends = begins + sizes
    are_words = _are_words(tensors, sizes)
    are_words &= np.array([one == memory.device for one in map(_DEVICE, tensors)], bool)
    goes_on = are_words[1:] & are_words[:-1] & (begins[1:] == ends[:-1])
    bounds = [0, *(np.flatnonzero(~goes_on) + 1).tolist(), len(tensors)]
    with torch.inference_mode():  # no gradient, nor a tangent
        for first, behind in pairwise(bounds):
            one, rows = tensors[first], tensors[first:behind]
            if not are_words[first]:
                place_of(memory, starts[first], one.dtype, one.shape).copy_(one)
                continue
            place, rows = memory[starts[first] : ends[behind - 1]], [row.view(-1) for row in rows]
            if one.dtype in _WIDE and len(set(map(_DTYPE, rows))) == 1:
                torch.cat(rows, out=place.view(one.dtype))
            else:
                torch.cat([row.view(_WORD) for row in rows], out=place.view(_WORD))


def nbytes_of(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Of each, int64."""
    return _numbers(map(Tensor.numel, tensors)) * _itemsizes(tensors)


def _are_words(tensors: Sequence[torch.Tensor], sizes: np.ndarray) -> np.ndarray:
    """Whether the memory of each can be viewed as a row of words, which are its values."""
    starts = _numbers(map(Tensor.storage_offset, tensors)) * _itemsizes(tensors)
    starts |= _numbers(map(Tensor.data_ptr, tensors)) | sizes
    otherwise = _numbers(map(Tensor.is_neg, tensors)) | _numbers(map(Tensor.is_conj, tensors))
    is_row = _numbers(map(Tensor.is_contiguous, tensors)) > otherwise
    is_row &= np.array([type(one) in PLAIN for one in tensors], bool)
    # One element, or none, may have any stride.
    return is_row & (starts % _WORD.itemsize == 0) & (_numbers(map(Tensor.numel, tensors)) > 1)


def _itemsizes(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    return _numbers(dtype.itemsize for dtype in map(_DTYPE, tensors))


def _numbers(of: Iterable[Any]) -> np.ndarray:
    return np.fromiter(of, np.int64)
