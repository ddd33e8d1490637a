"""How well each module's operands fit FP8, on the inputs of the clean run: SQNR and outliers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ...numerics.sqnr import SignalAndNoise
from .quantized_products import served_activation, served_weight
from .served_modules import ServedModule

_BLOCK = 128
_NAMED = 3  # outlier channels


@dataclass(frozen=True)
class Fit:
    """What quantization does to one module's operands, whatever the output makes of it.

    Attributes:
        weight_db: SQNR of the weight as it is served, dB.
        weight_blockwise_db, weight_per_channel_db: with one scale per 128×128 block, or per row.
        activation_db: SQNR of the inputs as they are served, or would be in FP8.
        activation_groups_db, activation_tokens_db: with one scale per token and 128 columns, or per
            token.
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
    def from_dict(cls, values: Mapping[str, Any]) -> Fit:
        outliers = tuple((int(channel), float(ratio)) for channel, ratio in values["outliers"])
        numbers = {
            name: math.inf if value is None else float(value)
            for name, value in values.items()
            if name != "outliers"
        }
        return cls(outliers=outliers, **numbers)


@dataclass
class _Sums:
    weight: dict[str, SignalAndNoise] = field(default_factory=dict)
    activation: dict[str, SignalAndNoise] = field(default_factory=dict)
    # Largest value of each input channel, by where the weight lies: experts have inputs of two sizes.
    largest: dict[int, torch.Tensor] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)


class FitObserver:
    """For `Products`: looks at operands in the clean run, and leaves the products to torch.

    Args:
        names: modules to look at.
        rounding, pow2_activations: as the plan has them.
    """

    def __init__(
        self, names: Collection[str], rounding: Mapping[str, Any], *, pow2_activations: bool = False
    ) -> None:
        self._names, self._rounding, self._pow2 = frozenset(names), rounding, pow2_activations
        self._sums: dict[str, _Sums] = {}

    def __call__(self, module: ServedModule, x: torch.Tensor, weight: torch.Tensor) -> None:
        if module.name not in self._names:
            return
        sums = self._sums.setdefault(module.name, _Sums())
        columns = x.shape[-1]
        if weight.data_ptr() not in sums.seen:  # the same in every batch
            sums.seen.add(weight.data_ptr())
            for which, block in _weight_blocks(module, columns).items():
                served = served_weight(weight, block, self._rounding, module.name)
                sums.weight.setdefault(which, SignalAndNoise()).add(weight, served)
        for which, group in _groups(module, columns).items():
            served = served_activation(x, group, self._pow2)
            sums.activation.setdefault(which, SignalAndNoise()).add(x, served)
        largest = x.reshape(-1, columns).abs().amax(0)
        known = sums.largest.get(weight.data_ptr())
        sums.largest[weight.data_ptr()] = (
            largest if known is None else torch.maximum(known, largest)
        )

    def fits(self) -> dict[str, Fit]:
        """Of every module that was seen."""
        return {name: _fit(sums) for name, sums in self._sums.items()}


def _weight_blocks(module: ServedModule, columns: int) -> dict[str, tuple[int, int]]:
    return {"served": module.block, "blockwise": (_BLOCK, _BLOCK), "per_channel": (1, columns)}


def _groups(module: ServedModule, columns: int) -> dict[str, int]:
    return {"served": module.block[1], "groups": _BLOCK, "tokens": columns}


def _fit(sums: _Sums) -> Fit:
    return Fit(
        weight_db=sums.weight["served"].db,
        weight_blockwise_db=sums.weight["blockwise"].db,
        weight_per_channel_db=sums.weight["per_channel"].db,
        activation_db=sums.activation["served"].db,
        activation_groups_db=sums.activation["groups"].db,
        activation_tokens_db=sums.activation["tokens"].db,
        outliers=max((_outliers(one) for one in sums.largest.values()), key=lambda row: row[0][1]),
    )


def _outliers(largest: torch.Tensor) -> tuple[tuple[int, float], ...]:
    median = float(largest.median()) or 1.0
    top = largest.topk(min(_NAMED, largest.numel()))
    return tuple(
        (int(channel), float(value) / median)
        for value, channel in zip(top.values, top.indices, strict=True)
    )
