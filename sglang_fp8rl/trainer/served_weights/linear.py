"""A linear module that computes with its weight as served, and keeps nothing of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from .cast import check_compute_dtype, served
from .rules import ServedWeightsError, WeightRule


class _ServedLinear(torch.autograd.Function):
    """`x · served(w)ᵀ + b`; straight-through: dX = dY · served(w), dW = dYᵀ · X.

    The parameter is saved, and its served weight made again: FSDP2 frees and gathers the parameter
    between the two, and so much memory is no one's.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rule: WeightRule
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rule = rule
        return nn.functional.linear(x, served(weight, rule).to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = (rows @ served(weight, ctx.rule, again=True).to(grad.dtype)).view(x.shape)
        if needs_weight:
            grad_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        if needs_bias:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None


class ServedLinear(nn.Linear):
    """Takes the place of a linear module's class (`swap.py`)."""

    served_rules: dict[str, WeightRule]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rule = self.served_rules["weight"]
        weight = self.weight
        bias: torch.Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        elif x.dtype != weight.dtype:
            raise ServedWeightsError(
                rule.name,
                f"{x.dtype} comes to {weight.dtype}",
                "what comes in has the parameter's dtype, or autocast says what is computed in",
                "Use torch.autocast, FSDP2's MixedPrecisionPolicy, or one dtype for the model.",
            )
        check_compute_dtype(x.dtype, rule)
        return _ServedLinear.apply(x, weight, bias, rule)
