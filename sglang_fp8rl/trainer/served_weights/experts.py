"""Any other module with weights that are served in FP8: experts in one tensor, above all.

Their forward passes differ (`transformers` has four of one class), so none is written again: while one
runs, the attribute that is the parameter otherwise is the served weight. What it computes keeps that
weight for its backward pass; the memory is given back in between, and filled again where the gradient
comes in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .cast import served
from .rules import WeightRule


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
    """Takes the place of a module's class (`swap.py`)."""

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
        outputs = [one for one in _tensors(out) if one.requires_grad]
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


def _tensors(out: Any) -> Iterable[torch.Tensor]:
    parts = out if isinstance(out, (tuple, list)) else (out,)
    return [one for one in parts if isinstance(one, torch.Tensor)]
