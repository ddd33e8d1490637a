"""Signal-to-quantization-noise ratio, the yardstick for anything behind a matrix product."""

from __future__ import annotations

import math

import torch


def sqnr_db(reference: torch.Tensor, approx: torch.Tensor) -> float:
    """`10 · log10(Σ reference² / Σ (reference - approx)²)` in dB, as torchao's `compute_error`.

    `inf` without noise, `-inf` without a signal; a NaN anywhere gives NaN. Raises `ValueError` if the shapes differ: broadcasting would hide a mistake.
    """
    if reference.shape != approx.shape:
        raise ValueError(f"sqnr_db: shapes {list(reference.shape)} and {list(approx.shape)} differ")
    wide = reference.double()
    noise = float((wide - approx.double()).square().sum())
    ratio = float(wide.square().sum()) / noise if noise else math.inf
    return 10 * math.log10(ratio) if ratio else -math.inf
