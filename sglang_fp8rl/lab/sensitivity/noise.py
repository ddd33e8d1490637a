"""How well each module's operands fit FP8, on the inputs of the clean run: SQNR and outliers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ...wire.plan import RefitPlan
from .quantized_products import has_pow2_activations, served_activation, served_weight
from .served_modules import ServedModule

_BLOCK = 128
_NAMED = 3  # outlier channels


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


@dataclass(frozen=True)
class Fit:
    """What quantization does to one module's operands, whatever the output makes of it: SQNR in dB.

    Attributes:
        weight_db: as it is served.
        weight_blockwise_db, weight_per_channel_db: with one scale per 128×128 block, or per row.
        activation_db: of the inputs as they are served, or would be in FP8.
        activation_groups_db, activation_tokens_db: with one scale per token and 128 columns, or per token.
        outliers: the input channels with the largest values: number, and how many times the median
            channel's largest value.
    """

    weight_db: float
    weight_blockwise_db: float
    weight_per_channel_db: float
    activation_db: float
    activation_groups_db: float
    activation_tokens_db: float
    outliers: tuple[tuple[int, float], ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows no infinity: null where nothing is lost."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Fit:
        """Of a row that has what `as_dict` gave."""
        values = {one.name: row[one.name] for one in fields(cls)}
        values = {name: math.inf if value is None else value for name, value in values.items()}
        return cls(**values | {"outliers": tuple(map(tuple, row["outliers"]))})


class FitObserver:
    """For `Products`: looks at operands of the modules `names`, and leaves all products to torch."""

    def __init__(self, names: Collection[str], plan: RefitPlan) -> None:
        self._names, self._plan = frozenset(names), plan
        # By module, then by field of `Fit`.
        self._energies: dict[str, dict[str, SignalAndNoise]] = {}
        # By module, then by where a weight lies (experts have inputs of two sizes): the largest value
        # of each input channel.
        self._largest: dict[str, dict[int, torch.Tensor]] = {}

    def __call__(self, module: ServedModule, x: torch.Tensor, weight: torch.Tensor) -> None:
        if module.name not in self._names:
            return
        energies = self._energies.setdefault(module.name, defaultdict(SignalAndNoise))
        largest = self._largest.setdefault(module.name, {})
        columns, address = x.shape[-1], weight.data_ptr()
        if address not in largest:  # a weight is the same in every batch
            blocks = {
                "weight_db": module.block,
                "weight_blockwise_db": (_BLOCK, _BLOCK),
                "weight_per_channel_db": (1, columns),
            }
            for name, block in blocks.items():
                served = served_weight(weight, block, self._plan.rounding, module.name)
                energies[name].add(weight, served)
        groups = {
            "activation_db": module.block[1],
            "activation_groups_db": _BLOCK,
            "activation_tokens_db": columns,
        }
        for name, group in groups.items():
            served = served_activation(x, group, has_pow2_activations(self._plan))
            energies[name].add(x, served)
        own = x.reshape(-1, columns).abs().amax(0)
        largest[address] = torch.maximum(own, largest.get(address, own))

    def fits(self) -> dict[str, Fit]:
        found = {}
        for module, energies in self._energies.items():
            outliers = [_outliers(one) for one in self._largest[module].values()]
            decibels = {name: energy.db for name, energy in energies.items()}
            found[module] = Fit(**decibels, outliers=max(outliers, key=lambda rows: rows[0][1]))
        return found


def _outliers(largest: torch.Tensor) -> tuple[tuple[int, float], ...]:
    median = float(largest.median()) or 1.0
    top = largest.topk(min(_NAMED, largest.numel()))
    return tuple(
        (int(channel), float(value) / median)
        for value, channel in zip(top.values, top.indices, strict=True)
    )
