"""Every tensor of a flattened bucket lies inside it, and on nobody else: checked before it is touched.

A recorded layout is replayed by address, where a start that is negative (but valid as a Python slice)
would be a read before the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import RefitError


def check_layout(metadata: Sequence[Any], nbytes: int) -> None:
    """Check the places of a bucket's tensors.

    Args:
        metadata: per tensor `name`, `shape`, `dtype`, and `start_idx`, `end_idx` in bytes.
        nbytes: of the buffer.

    Raises:
        RefitError: naming the first tensor that lies outside, is not as long as its shape says, is
            not aligned to its elements, or overlaps with another one. Nothing was read.
    """
    if not metadata:
        return
    starts = np.fromiter((one.start_idx for one in metadata), np.int64, len(metadata))
    ends = np.fromiter((one.end_idx for one in metadata), np.int64, len(metadata))
    sizes = np.fromiter((one.dtype.itemsize for one in metadata), np.int64, len(metadata))
    lengths = sizes * np.fromiter((math.prod(one.shape) for one in metadata), np.int64)
    order = np.argsort(starts, kind="stable")
    behind = np.zeros(len(metadata), np.int64)
    behind[order[1:]] = np.maximum.accumulate(ends[order])[:-1]
    rules = (
        ((starts < 0) | (ends > nbytes), f"a tensor lies within the bucket's {nbytes} bytes"),
        (
            (ends - starts != lengths) | (lengths < 0),
            "a tensor is as long as its shape and dtype say",
        ),
        (starts % sizes != 0, "a tensor starts at a multiple of its element size"),
        ((starts < behind) & (lengths > 0), "no two tensors of a bucket share bytes"),
    )
    for is_bad, rule in rules:
        if is_bad.any():
            one = metadata[int(np.flatnonzero(is_bad)[0])]
            raise RefitError(
                one.name,
                f"{tuple(one.shape)} {one.dtype} at bytes [{one.start_idx}, {one.end_idx})",
                rule,
                "Make the bucket with SGLang's FlattenedTensorBucket or RefitClient.",
            )
