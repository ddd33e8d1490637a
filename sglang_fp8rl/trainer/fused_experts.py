"""Experts that a trainer holds as one tensor, under the names that the plan has: one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..wire.plan import RefitPlan

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def one_by_one(name: str, tensor: Any, plan: RefitPlan) -> Iterator[tuple[str, Any]]:
    """`experts.gate_up_proj` `[E, 2I, H]` (gate rows first) and `experts.down_proj` `[E, H, I]`, as
    `transformers` 5 holds them, expert by expert where the plan has the experts so; views. Anything else
    as it is.
    """
    prefix, _, leaf = name.rpartition(".")
    parts = _PARTS.get(leaf, ())
    is_fused = (
        name not in plan.tensors
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dim() == 3
        and bool(parts)
        and all(f"{prefix}.0.{part}.weight" in plan.tensors for part in parts)
    )
    if not is_fused:
        yield name, tensor
        return
    for expert, weight in enumerate(tensor.detach()):
        for part, matrix in zip(parts, weight.chunk(len(parts)), strict=True):
            yield f"{prefix}.{expert}.{part}.weight", matrix
