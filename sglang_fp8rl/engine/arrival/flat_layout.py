"""Where the tensors of a flattened bucket lie: checked before any of it is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from ...errors import RefitError

_MOST = 1 << 62  # more bytes than any buffer has


def check_layout(metadata: Sequence[Any], nbytes: int) -> None:
    """Check that every tensor of a flattened bucket lies inside it, and on nobody else.

    A recorded layout is replayed by address, where a start that is negative (but valid as a Python
    slice) would be a read before the buffer.

    Args:
        metadata: per tensor `name`, `shape`, `dtype`, and `start_idx`, `end_idx` in bytes.
        nbytes: of the buffer.

    Raises:
        RefitError: naming the first tensor that lies outside, is not as long as its shape says, is
            not aligned to its elements, overlaps with another one, or is described by other things
            than numbers. Nothing was read.
    """
    if not metadata:
        return
    _check_types(metadata)
    starts = _bytes(one.start_idx for one in metadata)
    ends = _bytes(one.end_idx for one in metadata)
    sizes = _bytes(one.dtype.itemsize for one in metadata)
    lengths = _bytes(math.prod(one.shape, start=one.dtype.itemsize) for one in metadata)
    sides = _bytes(min(one.shape, default=0) for one in metadata)
    order = np.argsort(starts, kind="stable")
    behind = np.zeros(len(metadata), np.int64)
    behind[order[1:]] = np.maximum.accumulate(ends[order])[:-1]
    rules = (
        ((starts < 0) | (ends > nbytes), f"a tensor lies within the bucket's {nbytes} bytes"),
        (
            (ends - starts != lengths) | (sides < 0),
            "a tensor is as long as its shape and dtype say",
        ),
        (starts % sizes != 0, "a tensor starts at a multiple of its element size"),
        ((starts < behind) & (lengths > 0), "no two tensors of a bucket share bytes"),
    )
    for is_bad, rule in rules:
        if is_bad.any():
            raise _misplaced(metadata[int(np.flatnonzero(is_bad)[0])], rule)


def _check_types(metadata: Sequence[Any]) -> None:
    for one in metadata:
        numbers = (one.start_idx, one.end_idx, *one.shape)
        if not all(isinstance(number, Integral) for number in numbers):
            raise _misplaced(one, "offsets and shapes are whole numbers")
        if not isinstance(one.dtype, torch.dtype):
            raise _misplaced(one, "a tensor has a dtype of torch")


def _bytes(numbers: Iterable[int]) -> np.ndarray:
    """As int64; what does not fit is as good as `_MOST`."""
    return np.array([max(-_MOST, min(_MOST, number)) for number in numbers], np.int64)


def _misplaced(one: Any, rule: str) -> RefitError:
    return RefitError(
        str(one.name),
        f"{tuple(one.shape)} {one.dtype} at bytes [{one.start_idx}, {one.end_idx})",
        rule,
        "Make the bucket with SGLang's FlattenedTensorBucket or RefitClient.",
    )
