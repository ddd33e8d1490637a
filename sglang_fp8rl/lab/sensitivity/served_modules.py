"""The modules that a server would hold in FP8, and what each costs in high precision: off the plan."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ...config import LAYER
from ...numerics.grid import BlockGrid
from ...wire.plan import ModulePlan, RefitPlan, TensorPlan

_SCALE_BYTES = 4


@dataclass(frozen=True)
class ServedModule:
    """One module of the served model whose weights are FP8: what `ignored_layers` can name.

    Attributes:
        name: SGLang's (`model.layers.0.self_attn.qkv_proj`), as a prefix of `ignored_layers`.
        scheme: `blockwise` or `per_channel`.
        reason: why it is not blockwise; empty if it is.
        activations: `fp8` or `bf16`, as the plan says.
        block: what shares one scale of the weight; its second number is the columns of an activation
            that share one.
        tensors: what its weights are called in the checkpoint.
        weights: elements, over all ranks.
        scales: scales of them.
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
    def fp8_bytes(self) -> int:
        """Codes and scales."""
        return self.weights + _SCALE_BYTES * self.scales

    @property
    def extra_bytes(self) -> int:
        """What it takes more in BF16 than in FP8 with its scales."""
        return 2 * self.weights - self.fp8_bytes


def served_modules(plan: RefitPlan) -> list[ServedModule]:
    """All FP8 modules of a plan, in the order in which SGLang builds them."""
    tensors: dict[str, list[TensorPlan]] = {}
    for entry in plan.tensors.values():
        if entry.block_size is not None and entry.shape is not None:
            tensors.setdefault(entry.module, []).append(entry)
    return [
        _module(module, tensors[name]) for name, module in plan.modules.items() if name in tensors
    ]


def savings(modules: Iterable[ServedModule]) -> int:
    """Bytes that FP8 saves against BF16, scales paid for."""
    return sum(module.extra_bytes for module in modules)


def model_bytes(plan: RefitPlan, modules: Iterable[ServedModule]) -> int:
    """The served model's weights: FP8 with scales, the rest in BF16. Replicas count once."""
    elements = sum(math.prod(one.shape) for one in plan.tensors.values() if one.shape is not None)
    return 2 * elements - savings(modules)


def _module(module: ModulePlan, entries: list[TensorPlan]) -> ServedModule:
    block = entries[0].block_size
    assert block is not None
    weights = scales = 0
    for entry in entries:
        assert entry.shape is not None
        *stack, rows, columns = entry.shape
        grid = BlockGrid((rows, columns), block)
        weights += math.prod(entry.shape)
        scales += math.prod(stack) * math.prod(grid.scale_shape)
    decided = (module.module, module.scheme, module.reason, module.activations)
    return ServedModule(*decided, block, tuple(one.name for one in entries), weights, scales)
