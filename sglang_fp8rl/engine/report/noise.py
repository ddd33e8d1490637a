"""How much the cast of a refit costs: signal and noise on a few sampled blocks."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from ...numerics import dequantize
from ...numerics.sqnr import SignalAndNoise
from ...scheme import Granularity

_SAMPLES_PER_REFIT = 4


@dataclass
class Power(SignalAndNoise):
    """Of the samples of one granularity."""

    samples: int = 0

    def decibels(self) -> float | None:
        return round(self.db, 2) if self.signal and self.noise else None


@dataclass
class Noise:
    """The samples of one refit, a few of each scheme. Loaders may add from several threads."""

    power: dict[Granularity, Power] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wants(self, granularity: Granularity) -> bool:
        power = self.power.get(granularity)
        return power is None or power.samples < _SAMPLES_PER_REFIT

    def add(
        self,
        granularity: Granularity,
        source: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """Measure the cast on one corner block of a write, unless there are samples enough."""
        if not self.wants(granularity):
            return
        with self._lock:
            power = self.power.setdefault(granularity, Power())
            if power.samples >= _SAMPLES_PER_REFIT:
                return
            power.samples += 1
        rows, columns = min(128, source.shape[0]), min(128, source.shape[1])
        if granularity is Granularity.PER_CHANNEL:
            rows, columns, scale = min(8, rows), source.shape[1], scales[: min(8, rows)]
        else:
            scale = scales[:1, :1]
        exact = source[:rows, :columns].to(torch.bfloat16).float()
        served = dequantize(codes[:rows, :columns], scale, dtype=torch.float32)
        if bool(torch.isfinite(exact - served).all()):
            power.add(exact, served)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """For the status section."""
        powers = {granularity.value: power for granularity, power in self.power.items()}
        return {
            "sqnr_db": {name: power.decibels() for name, power in powers.items()},
            "sqnr_samples": {name: power.samples for name, power in powers.items()},
        }
