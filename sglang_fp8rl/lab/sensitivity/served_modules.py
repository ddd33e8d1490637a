"""The modules that a server would hold in FP8, what each costs in BF16, and which ones a budget buys."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ...config import LAYER
from ...errors import ConfigError
from ...formats.format import BlockGrid
from ...wire.plan import RefitPlan, TensorPlan

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)\s*")


@dataclass(frozen=True)
class ServedModule:
    """One module of the served model whose weights are FP8: what `ignored_layers` can name.

    Attributes:
        name: SGLang's (`model.layers.0.self_attn.qkv_proj`), as a prefix of `ignored_layers`.
        scheme, reason, activations: as the plan says.
        block: what shares one scale of the weight; its second number is the columns of an activation
            that share one.
        tensors: what its weights are called in the checkpoint.
        weights, scales: how many, over all ranks.
    """

    name: str
    scheme: str
    reason: str
    activations: str
    block: tuple[int, int]
    tensors: tuple[str, ...]
    weights: int
    scales: int

    @property
    def layer(self) -> int | None:
        """Number of its decoder layer; None outside of them."""
        found = LAYER.search(self.name)
        return int(found.group(1)) if found else None

    @property
    def kind(self) -> str:
        """Its name without what comes before the number: `self_attn.qkv_proj`."""
        return LAYER.split(self.name)[-1]

    @property
    def extra_bytes(self) -> int:
        """What it takes more in BF16 than in FP8 with its FP32 scales."""
        return 2 * self.weights - (self.weights + 4 * self.scales)


def served_modules(plan: RefitPlan) -> list[ServedModule]:
    """All FP8 modules of a plan, in the order in which SGLang builds them."""
    tensors: dict[str, list[TensorPlan]] = {}
    for entry in plan.tensors.values():
        if entry.block_size is not None and entry.shape is not None:
            tensors.setdefault(entry.module, []).append(entry)
    modules = []
    for name, module in plan.modules.items():
        entries = tensors.get(name, [])
        block = entries[0].block_size if entries else None
        if block is None:
            continue
        weights = scales = 0
        for entry in entries:
            *stack, rows, columns = entry.shape or ()
            weights += math.prod((*stack, rows, columns))
            scales += math.prod((*stack, *BlockGrid((rows, columns), block).scale_shape))
        names = tuple(entry.name for entry in entries)
        said = (module.scheme, module.reason, module.activations)
        modules.append(ServedModule(name, *said, block, names, weights, scales))
    return modules


def savings(modules: Iterable[ServedModule]) -> int:
    """Bytes that FP8 saves against BF16, scales paid for."""
    return sum(module.extra_bytes for module in modules)


def model_bytes(plan: RefitPlan, modules: Iterable[ServedModule]) -> int:
    """The served model's weights: FP8 with scales, the rest in BF16. Replicas count once."""
    elements = sum(math.prod(one.shape) for one in plan.tensors.values() if one.shape is not None)
    return 2 * elements - savings(modules)


@dataclass(frozen=True)
class Choice:
    """Modules for `ignored_layers`, in the order in which they were taken, and what they cost.

    `predicted_share` of the summed effects is left: 1 if nothing was taken.
    """

    modules: tuple[ServedModule, ...]
    extra_bytes: int
    predicted_share: float

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(module.name for module in self.modules)


def parsed_budget(text: str) -> tuple[Fraction, str]:
    """Amount and unit of a budget: `10%`, `12MB`, `1.5GiB`, `4096`. Raises `ConfigError` if it can't be read."""
    found = _AMOUNT.fullmatch(text)
    unit = found.group(2).upper() if found else "?"
    if found is None or (unit != "%" and unit not in _UNITS):
        raise ConfigError(
            "--budget",
            repr(text),
            "it has to be a share of what FP8 saves, or bytes",
            "Write 10%, 12MB, 1.5GiB or 4096.",
        )
    return Fraction(found.group(1)), unit


def budget_bytes(text: str, modules: Sequence[ServedModule]) -> int:
    """Bytes of a budget: of what FP8 saves on this model, where it is a share.

    Raises:
        ConfigError: it can't be read, or the cheapest module costs more.
    """
    amount, unit = parsed_budget(text)
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
