"""Signal-to-quantization-noise ratio, the yardstick for anything behind a matrix product."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class SignalAndNoise:
    """Energies of values and of what is wrong with their approximations, added up in FP64."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, value: torch.Tensor, approximate: torch.Tensor) -> None:
        wide = value.double()
        self.signal += float(wide.square().sum())
        self.noise += float((wide - approximate.double()).square().sum())

    @property
    def db(self) -> float:
        """`10 · log10(signal / noise)`; `inf` without noise, `-inf` without a signal."""
        if self.noise == 0:
            return math.inf
        ratio = self.signal / self.noise
        return 10 * math.log10(ratio) if ratio else -math.inf


def sqnr_db(reference: torch.Tensor, approx: torch.Tensor) -> float:
    """`10 · log10(Σ reference² / Σ (reference - approx)²)` in dB, as torchao's `compute_error`.

    A NaN anywhere gives NaN. Raises `ValueError` if the shapes differ: broadcasting would hide a mistake.
    """
    if reference.shape != approx.shape:
        raise ValueError(f"sqnr_db: shapes {list(reference.shape)} and {list(approx.shape)} differ")
    energies = SignalAndNoise()
    energies.add(reference, approx)
    return energies.db
