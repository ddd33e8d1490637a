"""Products of a `transformers` model as a server computes them: FP8 weights, FP8 activations unless the plan
leaves those in BF16.

Every linear layer, and every expert, ends in `torch.nn.functional.linear`. Calls whose weight belongs to a
chosen module get both operands quantized and dequantized by the server's rules (`numerics`, and the CPU
platform's activations), and their product in FP32; all others run as they are.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...numerics import dequantize, quantize
from ...wire.plan import RefitPlan
from ..cpu_platform.cpu_linear import quantize_per_token_group
from .served_modules import ServedModule


class Operand(str, Enum):
    """What of a product is quantized."""

    BOTH = "both"  # as it is served
    WEIGHTS = "weights"
    ACTIVATIONS = "activations"


class WeightMap:
    """Tells which served module a weight belongs to, by the memory that it lies in.

    A view finds its parameter: experts are slices `[N, K]` of one `[E, N, K]`.
    """

    def __init__(self, parameters: Iterable[tuple[torch.Tensor, ServedModule]]) -> None:
        self._rows = sorted(parameters, key=lambda row: row[0].data_ptr())

    def find(self, weight: torch.Tensor) -> ServedModule | None:
        address = weight.data_ptr()
        at = bisect.bisect_right(self._rows, address, key=lambda row: row[0].data_ptr())
        if not at:
            return None
        parameter, module = self._rows[at - 1]
        return module if address < parameter.data_ptr() + parameter.nbytes else None


class Products(TorchFunctionMode):
    """Within it, products with weights of a `WeightMap` go to `compute`.

    That is called as `compute(module, x [..., K], weight [N, K])`, and returns `[..., N]` without bias, or
    None to leave the product to torch.
    """

    def __init__(
        self,
        weights: WeightMap,
        compute: Callable[[ServedModule, torch.Tensor, torch.Tensor], torch.Tensor | None],
    ) -> None:
        super().__init__()
        self._weights, self._compute = weights, compute

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        product = None
        if func is torch.nn.functional.linear:
            product = self._product(*args, **kwargs)
        return func(*args, **kwargs) if product is None else product

    def _product(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Arguments as `torch.nn.functional.linear` names them."""
        module = self._weights.find(weight)
        product = None if module is None else self._compute(module, input, weight)
        return product if product is None or bias is None else product + bias


class ServedArithmetic:
    """For `Products`: those of the modules `names` as the plan rounds their operands; others are torch's."""

    def __init__(
        self, names: Collection[str], plan: RefitPlan, operand: Operand = Operand.BOTH
    ) -> None:
        self._names, self._plan, self._operand = frozenset(names), plan, operand

    def __call__(
        self, module: ServedModule, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor | None:
        if module.name not in self._names:
            return None
        wide_x, wide_weight = x.float(), weight.float()
        if self._operand is not Operand.ACTIVATIONS:
            wide_weight = served_weight(weight, module.block, self._plan.rounding, module.name)
        if self._operand is not Operand.WEIGHTS and module.activations == "fp8":
            wide_x = served_activation(x, module.block[1], has_pow2_activations(self._plan))
        return torch.matmul(wide_x, wide_weight.t()).to(x.dtype)


def served_weight(
    weight: torch.Tensor, block: tuple[int, int], rounding: Mapping[str, Any], name: str
) -> torch.Tensor:
    """`[N, K]` as the server's codes and scales stand for it, in FP32.

    Raises:
        QuantizationError: NaN or Inf.
    """
    codes, scales = quantize(weight.detach(), block, name=name, **rounding)
    return dequantize(codes, scales, block, torch.float32)


def has_pow2_activations(plan: RefitPlan) -> bool:
    return bool(plan.document["options"].get("use_activation_pow2_scale"))


def served_activation(x: torch.Tensor, group: int, pow2_scale: bool = False) -> torch.Tensor:
    """`[..., K]` as the kernels read it, quantized per token and `group` columns, in FP32."""
    rows = x.reshape(-1, x.shape[-1])
    codes, scale = quantize_per_token_group(rows, group, pow2_scale=pow2_scale)
    wide = scale.repeat_interleave(group, dim=1)[:, : rows.shape[1]]
    return (codes.float() * wide).reshape(x.shape)
