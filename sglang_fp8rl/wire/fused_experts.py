"""Experts held as one tensor, as `transformers` 5 does, under the names of checkpoints: one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .plan import RefitPlan

# `gate_up_proj` is `[E, 2I, H]`, gate rows first; `down_proj` `[E, H, I]`.
FUSED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def matrices_of(prefix: str, leaf: str, fused: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of every expert of the module `prefix`, as views; `leaf` is one of `FUSED_PARTS`."""
    parts = FUSED_PARTS[leaf]
    for expert, weight in enumerate(fused):
        for part, matrix in zip(parts, weight.chunk(len(parts)), strict=True):
            yield f"{prefix}.{expert}.{part}.weight", matrix


def one_by_one(name: str, tensor: Any, plan: RefitPlan) -> Iterator[tuple[str, Any]]:
    """Fused experts as `matrices_of`, where the plan has them so; anything else as it is."""
    prefix, _, leaf = name.rpartition(".")
    parts = FUSED_PARTS.get(leaf, ())
    is_fused = (
        name not in plan.tensors
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dim() == 3
        and bool(parts)
        and all(f"{prefix}.0.{part}.weight" in plan.tensors for part in parts)
    )
    if is_fused:
        yield from matrices_of(prefix, leaf, tensor.detach())
    else:
        yield name, tensor
