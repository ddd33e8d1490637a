"""What the last refit did, and whether the served weights are all of one piece."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..numerics import dequantize
from ..scheme import Granularity
from .coverage import RefitWindow, Region
from .sources import SourceIndex
from .targets import Target

_SAMPLES_PER_REFIT = 4
_MAX_LISTED = 16


@dataclass
class Power:
    """Signal and noise, to be summed over samples. SQNR = 10 log10(signal / noise)."""

    signal: float = 0.0
    noise: float = 0.0
    samples: int = 0

    def decibels(self) -> float | None:
        if not self.samples or not self.signal:
            return None
        return round(10 * math.log10(self.signal / self.noise), 2) if self.noise else None


@dataclass
class Refit:
    """The calls that make up one full or partial update."""

    seconds: float = 0.0
    nbytes: int = 0
    names: set[str] = field(default_factory=set)
    calls: int = 0
    errors: list[str] = field(default_factory=list)
    power: dict[Granularity, Power] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)


class RefitReport:
    """Bookkeeping of one model: cheap on the way, read by the status section."""

    def __init__(self, targets: Iterable[Target]) -> None:
        self._targets = list(targets)
        self._fp8 = [target for target in self._targets if target.is_fp8]
        self.known_names: dict[str, None] = {}
        self.failed: dict[tuple, str] = {}
        self.rank_errors: list[str] = []
        self.call_errors: list[str] = []
        self.window = RefitWindow()
        self.current = Refit()
        self.last: Refit | None = None
        self._started = 0.0
        self._lock = threading.Lock()

    # -- filled during an update -----------------------------------------------------------------

    def start_call(self, names: list[str]) -> None:
        """`names`: what is going to be sent; empty where that is not known (a checkpoint)."""
        if self.window.begin_call(names):
            self.last, self.current = self.current, Refit()
        self._started = time.perf_counter()

    def written(self, target: Target, region: Region | None) -> None:
        if region is not None:
            target.coverage.add(region, self.window.call)
        target.ever_written = True
        self.current.written.add(id(target))

    def sample(
        self,
        granularity: Granularity,
        source: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """Measure the cast on one corner block of a write; a few writes of each scheme per refit."""
        with self._lock:
            power = self.current.power.setdefault(granularity, Power())
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
        noise = (exact - served).square().sum().item()
        if math.isfinite(noise):
            power.signal += exact.square().sum().item()
            power.noise += noise

    def end_call(
        self, sources: SourceIndex, errors: dict[str, str], touched: dict[str, tuple]
    ) -> None:
        """Add one call to its refit.

        Args:
            errors: name (or "") to what went wrong.
            touched: name to the part of the model it was for; a part whose update failed stays
                failed until a later tensor for it is stored.
        """
        refit = self.current
        refit.seconds += time.perf_counter() - self._started
        refit.nbytes += sources.nbytes
        refit.names |= set(sources.names)
        refit.calls += 1
        self.call_errors = list(dict.fromkeys(errors.values()))
        refit.errors += self.call_errors
        stored = [name for name in touched if name not in errors]
        self.known_names.update(dict.fromkeys(stored))
        self.window.sent(set(stored))
        for name in stored:
            self.failed.pop(touched[name], None)
        self.failed.update({touched[name]: errors[name] for name in touched if name in errors})
        since = self.window.start
        self.window.is_complete = (
            not errors
            and all(target.coverage.new_fraction(since) == 1.0 for target in self._fp8)
            and not any(target.coverage.is_mixed(since) for target in self._targets)
        )

    def other_ranks(self, errors: list[str]) -> None:
        """What went wrong, and was not mended, on the ranks whose answer nobody sees."""
        self.rank_errors = errors
        self.current.errors += [text for text in errors if text not in self.current.errors]

    # -- read by the status section --------------------------------------------------------------

    def problems(self) -> list[str]:
        """Why the served weights are not of one piece; empty if they are."""
        found = []
        never = [target.name for target in self._fp8 if not target.ever_written]
        if never:
            found.append(
                f"{len(never)} of {len(self._fp8)} FP8 weights were never loaded "
                f"(dummy weights?), for example {never[0]}"
            )
        since = self.window.start
        mixed = [target for target in self._targets if target.coverage.is_mixed(since)]
        for target in mixed[:_MAX_LISTED]:
            boxes = ", ".join(map(str, target.coverage.new_regions(since)[:4]))
            found.append(
                f"{target.name}: only {target.coverage.new_fraction(since):.0%} is new ({boxes}), "
                "the rest is older"
            )
        if len(mixed) > _MAX_LISTED:
            found.append(f"{len(mixed) - _MAX_LISTED} more parameters are partly old")
        found += [
            f"failed and not mended: {text[:300]}"
            for text in list(self.failed.values())[:_MAX_LISTED]
        ]
        found += [f"the last call failed: {text[:300]}" for text in self.call_errors[:1]]
        return found + self.rank_errors

    def as_dict(self, refit: Refit | None) -> dict[str, Any] | None:
        if refit is None:
            return None
        missing = sum(id(target) not in refit.written for target in self._fp8)
        return {
            "seconds": round(refit.seconds, 6),
            "bytes": refit.nbytes,
            "gb_per_s": round(refit.nbytes / refit.seconds / 1e9, 3) if refit.seconds else None,
            "tensors": len(refit.names),
            "calls": refit.calls,
            "outcome": "failed" if self.failed or self.call_errors or self.rank_errors else "ok",
            "errors": refit.errors[:_MAX_LISTED],
            "complete": missing == 0,
            "fp8_weights_not_in_it": missing,
            "sqnr_db": {
                granularity.value: power.decibels() for granularity, power in refit.power.items()
            },
            "sqnr_samples": {
                granularity.value: power.samples for granularity, power in refit.power.items()
            },
        }
