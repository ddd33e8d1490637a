"""Which modules to leave in high precision for a given memory: the largest effect per byte first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ...errors import ConfigError
from .served_modules import ServedModule, savings

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)\s*")


@dataclass(frozen=True)
class Choice:
    """Modules for `ignored_layers`, in the order in which they were taken.

    Attributes:
        modules: what stays in high precision.
        extra_bytes: what that costs.
        predicted_share: of the summed effects, what is left: 1 if nothing was taken.
    """

    modules: tuple[ServedModule, ...]
    extra_bytes: int
    predicted_share: float

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(module.name for module in self.modules)


def budget_bytes(text: str, modules: Sequence[ServedModule]) -> int:
    """Bytes of a budget: `10%` of what FP8 saves on this model, or `12MB`, `1.5GiB`, `4096`.

    Raises:
        ConfigError: it can't be read, or the cheapest module costs more.
    """
    found = _AMOUNT.fullmatch(text)
    unit = found.group(2).upper() if found else "?"
    if found is None or (unit != "%" and unit not in _UNITS):
        raise ConfigError(
            "--budget",
            repr(text),
            "it is a share of what FP8 saves, or bytes",
            "Write 10%, 12MB, 1.5GiB or 4096.",
        )
    amount = Fraction(found.group(1))
    allowed = int(amount * savings(modules) / 100 if unit == "%" else amount * _UNITS[unit])
    cheapest = min(modules, key=lambda module: module.extra_bytes)
    if allowed < cheapest.extra_bytes:
        share = cheapest.extra_bytes / savings(modules)
        raise ConfigError(
            "--budget",
            f"{text} is {allowed} bytes",
            f"the cheapest module, {cheapest.name}, costs {cheapest.extra_bytes} bytes more in BF16 "
            f"({share:.3%} of what FP8 saves)",
            f"Allow at least {cheapest.extra_bytes} bytes.",
        )
    return allowed


def choose(modules: Sequence[ServedModule], effects: Mapping[str, float], allowed: int) -> Choice:
    """Greedy: by effect per extra byte, whatever still fits; ties by name.

    Args:
        effects: name to what its quantization alone adds to the divergence, not negative.
        allowed: extra bytes.
    """
    ranked = sorted(modules, key=lambda one: (-effects[one.name] / one.extra_bytes, one.name))
    taken: list[ServedModule] = []
    spent = 0
    for module in ranked:
        if effects[module.name] > 0 and spent + module.extra_bytes <= allowed:
            taken.append(module)
            spent += module.extra_bytes
    return Choice(tuple(taken), spent, share_left(effects, [one.name for one in taken]))


def share_left(effects: Mapping[str, float], exempt: Sequence[str]) -> float:
    """Of the sum of all effects, that of the modules which are not exempt; 1 where all are 0."""
    total = sum(effects.values())
    left = sum(effect for name, effect in effects.items() if name not in set(exempt))
    return left / total if total > 0 else 1.0
