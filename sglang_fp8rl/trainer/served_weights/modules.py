"""How a module computes with its weights as its server holds them: the cast, linear modules, and any others.

Each class here takes the place of a module's own (`swap.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ...numerics import through_fp8
from ...wire.sendable import is_freed
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
    options: Any = {"pow2_scale": pow2, "round_to_bf16": to_bf16}
    stack = weight.detach().reshape(rows, columns)
    if (rows // matrices) % block[0] == 0:  # no block reaches into the next matrix
        return through_fp8(stack, block, **options).view(weight.shape)
    parts = [through_fp8(one, block, **options) for one in stack.chunk(matrices)]
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
        ServedWeightsError: a shard, memory that FSDP has freed, a dtype that nothing is computed in.
    """
    if hasattr(weight, "to_local"):
        raise ServedWeightsError(
            rule.name,
            f"a DTensor placed as {getattr(weight, 'placements', ())} while it is computed with",
            "scales belong to whole blocks, so a weight is gathered before it is used",
            "Shard with fully_shard, which gathers it; tensor parallelism in the trainer is not served.",
        )
    if not torch.compiler.is_compiling() and is_freed(weight):
        raise ServedWeightsError(
            rule.name,
            "its memory is not there",
            "FSDP gathers a weight before its module computes, and where a gradient comes to what it returned",
            "Compute the loss from what the module returns, not from what it keeps.",
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
    """`x · served(w)ᵀ + b`; straight-through: dX = dY · served(w), dW = dYᵀ · X, to which autograd gives w's dtype.

    The parameter's memory is saved, and its served weight made again: FSDP2 frees and gathers that memory
    between the two, and so much more is no one's. Not the parameter, which `.data =` gives another memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rule: WeightRule
    ) -> torch.Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight.detach() if needs_x else None)
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
            grad_x = rows @ served(weight, ctx.rule, again=True).to(grad.dtype)
            grad_x = grad_x.view(*grad.shape[:-1], weight.shape[-1])
        if needs_weight:
            grad_weight = rows.t() @ x.reshape(-1, x.shape[-1])
        if needs_bias:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None


class ServedLinear(nn.Linear):
    """A linear module; keeps nothing of its served weight."""

    served_rules: dict[str, WeightRule]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rule = self.served_rules["weight"]
        weight = self.weight
        bias: torch.Tensor | None = self.bias
        if not input.is_meta and torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
        elif input.dtype != weight.dtype:
            raise ServedWeightsError(
                rule.name,
                f"{input.dtype} comes to {weight.dtype}",
                "what comes in has the parameter's dtype, or autocast says what is computed in",
                "Use torch.autocast, FSDP2's MixedPrecisionPolicy, or one dtype for the model.",
            )
        check_compute_dtype(input.dtype, rule)
        return _ServedLinear.apply(input, weight, bias, rule)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rule: WeightRule) -> torch.Tensor:
        return served(weight, rule).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None


class ServedExperts(nn.Module):
    """Any other module: experts in one tensor, above all.

    Their forward passes differ (`transformers` has four of one class), so none is written again: while one
    runs, the attribute that is the parameter otherwise is the served weight. Where that is saved for a
    backward pass, the parameter's memory is saved in its place, and what is needed of it made again when it is
    needed: by then FSDP2 has gathered the parameter.
    """

    served_rules: dict[str, WeightRule]

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        running, thread = _LENT.setdefault(self, {}), threading.get_ident()
        if thread in running:  # a forward that calls itself with chunks
            return super().forward(*args, **kwargs)
        lent = {leaf: self.straight_through(leaf) for leaf in self.served_rules}
        running[thread] = lent
        try:
            with self._saved_as_parameters(lent):
                return super().forward(*args, **kwargs)
        finally:
            del running[thread]

    def straight_through(self, leaf: str) -> torch.Tensor:
        """A parameter as served, whose gradient is the parameter's."""
        parameter: Any = self._parameters.get(leaf)
        if parameter is None:
            raise self.not_its_own(leaf)
        rule, device = self.served_rules[leaf], parameter.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            check_compute_dtype(torch.get_autocast_dtype(device), rule)
        return _StraightThrough.apply(parameter, rule)

    def not_its_own(self, leaf: str) -> ServedWeightsError:
        """The error where the module has another tensor than a parameter of its own."""
        return ServedWeightsError(
            self.served_rules[leaf].name,
            "another tensor takes the place of the parameter (prune, parametrize, an adapter, DataParallel)",
            "what is served is the parameter of the module that was swapped",
            "Call compute_as_stored(model) before; merge adapters; shard with fully_shard.",
        )

    def _saved_as_parameters(self, lent: dict[str, torch.Tensor]) -> AbstractContextManager[Any]:
        """While it lasts, autograd saves a parameter for what lies in the memory that was lent for it."""
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return nullcontext()  # checkpointing lets go of all that is saved; offloading moves it
        leaves = {one.untyped_storage()._cdata: leaf for leaf, one in lent.items()}

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int, WeightRule | None, _Place]:
            place = (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
            leaf = leaves.get(tensor.untyped_storage()._cdata)
            if leaf is None:
                return tensor.detach(), tensor._version, None, place
            parameter: Any = self._parameters[leaf]
            return parameter.detach(), parameter._version, self.served_rules[leaf], place

        return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


# What is lent to a module that computes now, by the thread that it computes in.
_LENT: WeakKeyDictionary[nn.Module, dict[int, dict[str, torch.Tensor]]] = WeakKeyDictionary()
_Place = tuple[Sequence[int], Sequence[int], int]  # of a tensor in its memory: size, stride, offset


def _unpack(saved: tuple[torch.Tensor, int, WeightRule | None, _Place]) -> torch.Tensor:
    """A saved tensor; of a served weight the matrices that the place reaches into, made again."""
    tensor, version, rule, (size, stride, offset) = saved
    if tensor._version != version:  # torch looks at no versions where tensors are saved by hooks
        raise ServedWeightsError(
            rule.name if rule is not None else f"a tensor of shape {tuple(size)}",
            f"changed in place {tensor._version - version} time(s) between forward and backward pass",
            "gradients are of what was computed with",
            "Step the optimizer behind the backward pass.",
        )
    if rule is None:
        return tensor
    sides = zip(size, stride, strict=True)
    reach = 0 if 0 in size else sum((n - 1) * step for n, step in sides)
    each = tensor.numel() // rule.matrices
    first, last = offset // each, (offset + reach) // each
    matrices = tensor.detach().reshape(rule.matrices, -1, tensor.shape[-1])[first : last + 1]
    again = served(matrices, replace(rule, matrices=last + 1 - first), again=True)
    return again.to(tensor.dtype).as_strided(size, stride, offset - first * each)


def lent_weight(leaf: str) -> property:
    """The attribute of a parameter: as served while the module computes, itself otherwise."""

    def get(module: Any) -> Any:
        running = _LENT.get(module, {})
        lent = running.get(threading.get_ident())
        is_backward = torch._C._current_graph_task_id() != -1
        if lent is not None:
            return lent[leaf]
        if running and not is_backward:
            raise ServedWeightsError(
                module.served_rules[leaf].name,
                "read by another thread than the one that its module computes in",
                "each forward pass computes with what is served of the parameter then",
                "Compute in the thread that calls the module, and read parameters behind it.",
            )
        # A part of the module computes again in a backward pass: it was checkpointed by itself. Hooks there, such as
        # an optimizer's, have no gradients on, and want the parameter.
        is_again = is_backward and torch.is_grad_enabled()
        return module.straight_through(leaf) if is_again else nn.Module.__getattr__(module, leaf)

    def refuse(module: Any, value: Any) -> None:  # of a parameter torch's own attribute takes it
        raise module.not_its_own(leaf)

    return property(get, refuse)
