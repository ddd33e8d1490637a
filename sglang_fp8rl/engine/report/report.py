"""What the last refit did, and whether the served weights are all of one piece."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...numerics import dequantize
from ...scheme import Granularity
from ..interception.region import Region
from ..model.parameters import Target
from .coverage import CoverageTable
from .refit_window import RefitWindow

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
    """The calls that make up one full or partial update.

    Attributes:
        numbers: of the names that came (`RefitWindow.numbers_of`), call by call.
        written: per target, whether any of it was.
    """

    seconds: float = 0.0
    nbytes: int = 0
    numbers: list[np.ndarray] = field(default_factory=list)
    calls: int = 0
    errors: list[str] = field(default_factory=list)
    power: dict[Granularity, Power] = field(default_factory=dict)
    written: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))

    @property
    def tensors(self) -> int:
        return len(np.unique(np.concatenate(self.numbers))) if self.numbers else 0


@dataclass(frozen=True)
class Arrived:
    """What one call brought.

    Attributes:
        numbers: of all names, and `stored`: of those that a parameter took.
        touched: name to the part of the model it was for.
        is_replayed: whether all of its names were known before.
    """

    numbers: np.ndarray
    stored: np.ndarray
    nbytes: int
    touched: Mapping[str, tuple]
    is_replayed: bool = False


class RefitReport:
    """Bookkeeping of one model: cheap on the way, read by the status section."""

    def __init__(self, targets: Iterable[Target]) -> None:
        self._targets = list(targets)
        self._is_fp8 = np.array([target.is_fp8 for target in self._targets], bool)
        self.coverage = CoverageTable([tuple(target.parameter.shape) for target in self._targets])
        # Every name that was ever stored, and the part of the model it is for.
        self.known_names: dict[str, tuple] = {}
        self.failed: dict[tuple, str] = {}
        self.rank_errors: list[str] = []
        self.call_errors: list[str] = []
        self.window = RefitWindow()
        self.current = self._new_refit()
        self.last: Refit | None = None
        self._ever_written = np.zeros(len(self._targets), bool)
        self._started = 0.0
        self._lock = threading.Lock()

    def _new_refit(self) -> Refit:
        return Refit(written=np.zeros(len(self._targets), bool))

    # -- filled during an update -----------------------------------------------------------------

    def start_call(self, numbers: np.ndarray) -> None:
        """`numbers`: of the names to come; empty where they are not known (a checkpoint)."""
        self._started = time.perf_counter()
        if self.window.begin_call(numbers):
            self.last, self.current = self.current, self._new_refit()

    def written(self, target: Target, region: Region | None) -> None:
        if region is not None:
            number = self.coverage.number_of(target.index, region)
            self.coverage.write([number], self.window.call)
        self.current.written[target.index] = self._ever_written[target.index] = True

    def written_again(self, targets: np.ndarray, regions: np.ndarray) -> None:
        """As `written` for many at once: the targets' indices, and the regions' numbers."""
        self.coverage.write(regions, self.window.call)
        self.current.written[targets] = self._ever_written[targets] = True

    def wants_sample(self, granularity: Granularity) -> bool:
        power = self.current.power.get(granularity)
        return power is None or power.samples < _SAMPLES_PER_REFIT

    def sample(
        self,
        granularity: Granularity,
        source: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """Measure the cast on one corner block of a write; a few writes of each scheme per refit."""
        if not self.wants_sample(granularity):
            return
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

    def end_call(self, arrived: Arrived, errors: dict[str, str]) -> None:
        """Add one call to its refit.

        A part of the model whose update failed stays failed until a later tensor for it is stored.

        Args:
            errors: name (or "") to what went wrong.
        """
        refit, touched = self.current, arrived.touched
        refit.seconds += time.perf_counter() - self._started
        refit.nbytes += arrived.nbytes
        refit.numbers.append(arrived.numbers)
        refit.calls += 1
        self.call_errors = list(dict.fromkeys(errors.values()))
        refit.errors += self.call_errors
        self.window.stored(arrived.stored)
        if not arrived.is_replayed:
            self.known_names.update(
                (name, part) for name, part in touched.items() if name not in errors
            )
        if errors or self.failed:
            self._note_failed(touched, errors)
        if errors:
            self.window.is_complete = False
            return
        new = self.coverage.new_elements(self.window.start)
        is_whole = new == self.coverage.sizes
        self.window.is_complete = bool((is_whole | ((new == 0) & ~self._is_fp8)).all())
        if self.window.is_complete:
            self.failed.clear()

    def _note_failed(self, touched: Mapping[str, tuple], errors: dict[str, str]) -> None:
        """Parts that were stored are mended; parts that were not, by this call or ever, are not."""
        for name in touched.keys() - errors.keys():
            self.failed.pop(touched[name], None)
        for name, text in errors.items():
            part = touched.get(name) or self.known_names.get(name)
            if part is not None:
                self.failed[part] = text

    def refused(self, texts: list[str]) -> None:
        """Something was refused before it became a call, or at the end of a session.

        Nobody knows which part of the model it was for: only a full update mends it.
        """
        self.call_errors = list(dict.fromkeys(texts))
        self.current.errors += self.call_errors
        self.failed.update({("refused", text): text for text in self.call_errors})
        self.window.is_complete = False

    def weights_lost(self) -> None:
        """Their memory was given back: nothing of what was written is there any more."""
        self.last, self.current = self.current, self._new_refit()
        self._ever_written[:] = False
        self.coverage.forget()
        self.window.restart()

    def other_ranks(self, errors: list[str]) -> None:
        """What went wrong, and was not mended, on the ranks whose answer does not reach the client."""
        self.rank_errors = errors
        self.current.errors += [text for text in errors if text not in self.current.errors]

    # -- read by the status section --------------------------------------------------------------

    def problems(self) -> list[str]:
        """Why the served weights are not of one piece; empty if they are."""
        found = []
        coverage, since = self.coverage, self.window.start
        fp8 = np.flatnonzero(self._is_fp8)
        never = fp8[~self._ever_written[fp8]]
        if len(never):
            found.append(
                f"{len(never)} of {len(fp8)} FP8 weights were never loaded "
                f"(dummy weights, or memory that was released?), for example {self._targets[never[0]].name}"
            )
        mixed = np.flatnonzero(coverage.is_mixed(since))
        fraction = coverage.new_fraction(since)
        for index in mixed[:_MAX_LISTED].tolist():
            boxes = ", ".join(map(str, coverage.new_regions(index, since)[:4]))
            found.append(
                f"{self._targets[index].name}: only {fraction[index]:.0%} is new ({boxes}), "
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
        missing = int((self._is_fp8 & ~refit.written).sum())
        return {
            "seconds": round(refit.seconds, 6),
            "bytes": refit.nbytes,
            "gb_per_s": round(refit.nbytes / refit.seconds / 1e9, 3) if refit.seconds else None,
            "tensors": refit.tensors,
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
