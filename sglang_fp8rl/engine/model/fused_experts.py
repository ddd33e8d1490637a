"""Experts sent as one tensor, as `transformers` 5 holds them in memory.

Some of SGLang's models read `experts.gate_up_proj` themselves, in a layout of their own. For the others,
what they left is handed to them once more, expert by expert, under the names they know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...wire.fused_experts import FUSED_PARTS, matrices_of
from ..arrival.sent_tensors import Source


def load_left_experts(
    model: torch.nn.Module, left: Iterable[Source], load_weights: Callable[..., Any]
) -> None:
    """Load the fused experts among `left`, the tensors that no loader was called for.

    A name counts as fused experts if it is that of a `FusedMoE` module with `gate_up_proj` (`[E, 2I,
    H]`, gate rows first) or `down_proj` (`[E, H, I]`) behind it. The shapes are checked with each expert.
    """
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    fused = {
        source.name: source.tensor
        for source in left
        if source.tensor is not None and len(source.shape) == 3
    }
    if not fused:
        return
    parts: list[tuple[str, torch.Tensor]] = []
    for prefix, module in model.named_modules():
        if isinstance(module, FusedMoE):
            for leaf in FUSED_PARTS:
                if f"{prefix}.{leaf}" in fused:
                    parts += matrices_of(prefix, leaf, fused[f"{prefix}.{leaf}"])
    if parts:
        load_weights(parts)
