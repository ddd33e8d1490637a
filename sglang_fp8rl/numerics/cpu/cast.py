"""The CPU cast through Numba; it allocates nothing the size of a tensor."""

from __future__ import annotations

from functools import partial

import torch

from .jit import by_rows
from .kernels import BF16_STEP, CODE, NO_STEP, SLIM, WIDE, cast_region


def cast_into(
    source: torch.Tensor,
    target: torch.Tensor,
    weight_scale: torch.Tensor,
    nonfinite: torch.Tensor,
    block: tuple[int, int],
    pow2_scale: bool,
    round_to_bf16: bool,
) -> None:
    """As `reference.cast_into`, for FP32 and BF16 in contiguous rows; a NaN in BF16 may have other bits.

    The bytes do not depend on the number of threads, which is torch's for a large tensor.
    """
    rows, cols = source.shape
    # Addresses, because arrays cost a small tensor more than its cast: each is three calls here.
    cast_rows = partial(
        cast_region,
        source.data_ptr(),
        WIDE if source.dtype == torch.float32 else SLIM,
        source.stride(0),
        target.data_ptr(),
        SLIM if target.dtype == torch.bfloat16 else CODE,
        target.stride(0),
        weight_scale.data_ptr(),
        *weight_scale.stride(),
        nonfinite.data_ptr(),
        rows,
        cols,
        *block,
        BF16_STEP if round_to_bf16 else NO_STEP,
        bool(pow2_scale),
    )
    by_rows(cast_rows, rows, cols, block[0])
