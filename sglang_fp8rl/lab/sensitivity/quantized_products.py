"""Products of a `transformers` model as a server computes them: FP8 weights, FP8 activations unless the plan
leaves those in BF16.

Every linear layer, and every expert, ends in `torch.nn.functional.linear`. Calls whose weight belongs to a
chosen module get both operands quantized and dequantized by the server's rules (`numerics`, and the CPU
platform's activations), and their product in FP32; all others run as they are. Nothing of the model is
changed.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...numerics import Blockwise, PerChannel, dequantize, quantize
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

    Args:
        parameters: of the model, each with the module that serves it.
    """

    def __init__(self, parameters: Iterable[tuple[torch.Tensor, ServedModule]]) -> None:
        rows = sorted(
            ((one.data_ptr(), one.data_ptr() + one.nbytes, module) for one, module in parameters),
            key=lambda row: row[0],
        )
        self._rows, self._starts = rows, [row[0] for row in rows]

    def find(self, weight: torch.Tensor) -> ServedModule | None:
        at = bisect.bisect_right(self._starts, weight.data_ptr()) - 1
        if at < 0:
            return None
        _, end, module = self._rows[at]
        return module if weight.data_ptr() < end else None


class Products(TorchFunctionMode):
    """Within it, products with weights of a `WeightMap` go to `compute`.

    Args:
        compute: called as `compute(module, x [..., K], weight [N, K])`; returns `[..., N]` without bias,
            or None to leave the product to torch.
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
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.linear:
            x, weight, bias = _operands(*args, **kwargs)
            module = self._weights.find(weight)
            product = None if module is None else self._compute(module, x, weight)
            if product is not None:
                return product if bias is None else product + bias
        return func(*args, **kwargs)


class ServedArithmetic:
    """The product of a served module, for `Products`.

    Args:
        names: modules that are quantized; all others are left to torch.
        rounding: of the weights, as `RefitPlan.rounding` has it.
        pow2_activations: activation scales are powers of two.
        operand: what is quantized.
    """

    def __init__(
        self,
        names: Collection[str],
        rounding: Mapping[str, Any],
        *,
        pow2_activations: bool = False,
        operand: Operand = Operand.BOTH,
    ) -> None:
        self._names, self._rounding = frozenset(names), rounding
        self._pow2, self._operand = pow2_activations, operand

    def __call__(
        self, module: ServedModule, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor | None:
        if module.name not in self._names:
            return None
        wide_x, wide_weight = x.float(), weight.float()
        if self._operand is not Operand.ACTIVATIONS:
            wide_weight = served_weight(weight, module.block, self._rounding, module.name)
        if self._operand is not Operand.WEIGHTS and module.activations == "fp8":
            wide_x = served_activation(x, module.block[1], self._pow2)
        return torch.matmul(wide_x, wide_weight.t()).to(x.dtype)


def served_weight(
    weight: torch.Tensor, block: tuple[int, int], rounding: Mapping[str, Any], name: str
) -> torch.Tensor:
    """`[N, K]` as the server's codes and scales stand for it, in FP32.

    Raises:
        QuantizationError: NaN or Inf.
    """
    is_per_channel = block == (1, weight.shape[1])
    granularity = PerChannel() if is_per_channel else Blockwise.of(block)
    codes, scales = quantize(weight.detach(), granularity, name=name, **rounding)
    return dequantize(codes, scales, block, torch.float32)


def served_activation(x: torch.Tensor, group: int, pow2_scale: bool = False) -> torch.Tensor:
    """`[..., K]` as the kernels read it, quantized per token and `group` columns, in FP32."""
    rows = x.reshape(-1, x.shape[-1])
    codes, scale = quantize_per_token_group(rows, group, pow2_scale=pow2_scale)
    wide = scale.repeat_interleave(group, dim=1)[:, : rows.shape[1]]
    return (codes.float() * wide).reshape(x.shape)


def _operands(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Under the names that `torch.nn.functional.linear` has for them."""
    return input, weight, bias
