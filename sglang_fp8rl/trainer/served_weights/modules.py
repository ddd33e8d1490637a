"""How a module computes with its weights as its server holds them: the cast, linear modules, and any others.

Each class here takes the place of a module's own (`swap.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from ...numerics import Blockwise, through_fp8
from .rules import ServedWeightsError, WeightRule


@torch.library.custom_op(
    "sglang_fp8rl::served",
    mutates_args=(),
    schema="(Tensor weight, int matrices, int[] block, bool pow2, bool to_bf16, bool again) -> Tensor",
)
def _served(
    weight: torch.Tensor, matrices: int, block: list[int], pow2: bool, to_bf16: bool, again: bool
) -> torch.Tensor:
    columns = weight.shape[-1]
    rows = weight.numel() // columns
    granularity = Blockwise.of(block)
    options: Any = {"pow2_scale": pow2, "round_to_bf16": to_bf16}
    stack = weight.detach().reshape(rows, columns)
    if (rows // matrices) % granularity.block_n == 0:  # no block reaches into the next matrix
        return through_fp8(stack, granularity, **options).view(weight.shape)
    parts = [through_fp8(one, granularity, **options) for one in stack.chunk(matrices)]
    return torch.cat(parts).view(weight.shape)


@_served.register_fake
def _(
    weight: torch.Tensor, matrices: int, block: list[int], pow2: bool, to_bf16: bool, again: bool
) -> torch.Tensor:
    return torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)


def served(weight: torch.Tensor, rule: WeightRule, *, again: bool = False) -> torch.Tensor:
    """`weight` through the server's cast and back, BF16, contiguous; no gradient.

    Args:
        again: in a backward pass. Nothing changes but that a compiler takes both for two values, and
            does not keep one for the other.

    Raises:
        ServedWeightsError: a shard, a dtype that nothing is computed in.
    """
    if hasattr(weight, "to_local"):
        raise ServedWeightsError(
            rule.name,
            f"a DTensor placed as {getattr(weight, 'placements', ())} while it is computed with",
            "scales belong to whole blocks, so a weight is gathered before it is used",
            "Shard with fully_shard, which gathers it; tensor parallelism in the trainer is not served.",
        )
    check_compute_dtype(weight.dtype, rule)
    rounding = (rule.pow2_scale, rule.round_to_bf16)
    return torch.ops.sglang_fp8rl.served(weight, rule.matrices, rule.block, *rounding, again)


def check_compute_dtype(dtype: torch.dtype, rule: WeightRule) -> None:
    """Raises `ServedWeightsError` where a served weight would be rounded once more."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ServedWeightsError(
            rule.name,
            f"computed in {dtype}",
            "served weights are BF16 numbers, which BF16 and FP32 hold and FP16 does not",
            "Train in BF16, or with FP32 parameters.",
        )


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
    """A linear module; keeps nothing of its served weight."""

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


class _Loan:
    """The memory of one served weight; alive as long as something of a graph is."""

    def __init__(self, weight: torch.Tensor, rule: WeightRule, lent: torch.Tensor) -> None:
        self.weight, self.rule = weight, rule
        self.shape, self.nbytes = lent.shape, lent.nbytes
        self._ref = StorageWeakRef(lent.untyped_storage())

    def take_back(self) -> None:
        storage = self._storage()
        if storage is not None:
            storage.resize_(0)

    def fill_again(self, *_: Any) -> None:
        storage = self._storage()
        if storage is None or storage.nbytes():  # let go of, as by checkpointing; or there still
            return
        storage.resize_(self.nbytes)
        # Through a tensor of its own: what autograd has saved is not changed, it is there again.
        there = torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)
        there.set_(storage, 0, self.shape)  # type: ignore[call-overload]
        there.copy_(served(self.weight.detach(), self.rule, again=True))

    def _storage(self) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, rule: WeightRule, loans: list[_Loan]
    ) -> torch.Tensor:
        lent = served(weight, rule).to(weight.dtype)
        ctx.loan = _Loan(weight, rule, lent)
        loans.append(ctx.loan)
        return lent

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.loan.take_back()
        return grad, None, None


class ServedExperts(nn.Module):
    """Any other module: experts in one tensor, above all.

    Their forward passes differ (`transformers` has four of one class), so none is written again: while one
    runs, the attribute that is the parameter otherwise is the served weight. What it computes keeps that
    weight for its backward pass; the memory is given back in between, and filled again where the gradient
    comes in.
    """

    served_rules: dict[str, WeightRule]

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        loans: list[_Loan] = []
        self.__dict__["_lent"] = {
            leaf: _StraightThrough.apply(self._parameters[leaf], rule, loans)
            for leaf, rule in self.served_rules.items()
        }
        try:
            out = super().forward(*args, **kwargs)
        finally:
            del self.__dict__["_lent"]
        parts = out if isinstance(out, (tuple, list)) else (out,)
        outputs = [one for one in parts if isinstance(one, torch.Tensor) and one.requires_grad]
        # In a backward pass (checkpointing) the weights are used next.
        if outputs and torch._C._current_graph_task_id() == -1:
            for loan in loans:
                loan.take_back()
                for one in outputs:
                    one.register_hook(loan.fill_again)
        return out


def lent_weight(leaf: str) -> property:
    """The attribute of a parameter: as served while the module computes, itself otherwise."""

    def get(module: nn.Module) -> Any:
        lent = module.__dict__.get("_lent")
        return module._parameters[leaf] if lent is None else lent[leaf]

    return property(get)
