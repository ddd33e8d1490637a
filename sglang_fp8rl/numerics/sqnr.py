"""Signal-to-quantization-noise ratio, the yardstick for anything behind a matrix product."""

from __future__ import annotations

import torch


def sqnr_db(reference: torch.Tensor, approx: torch.Tensor) -> float:
    """`10 · log10(Σ reference² / Σ (reference - approx)²)` in dB, summed in FP64.

    The definition of torchao's `compute_error`. Equal tensors give `inf` (two zero tensors too);
    a zero reference with noise gives `-inf`; a NaN anywhere gives NaN.

    Args:
        reference, approx: same shape, any float dtype (FP8 as dequantized values).

    Raises:
        ValueError: the shapes differ (broadcasting would hide a mistake).
    """
    if reference.shape != approx.shape:
        raise ValueError(f"sqnr_db: shapes {list(reference.shape)} and {list(approx.shape)} differ")
    signal = reference.double()
    noise = (signal - approx.double()).square().sum()
    if noise == 0:
        return float("inf")
    return float(10 * torch.log10(signal.square().sum() / noise))
