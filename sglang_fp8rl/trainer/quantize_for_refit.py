"""Quantize before transfer: what the server would make of a weight, made on the trainer's device.

```
plan = fetch_plan(url)
client.update(quantize_for_refit(model.state_dict().items(), plan), plan=plan)
```

The bytes are those the server would have made; half of BF16's go over the wire, a quarter of FP32's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..numerics import FP8_DTYPE, quantize
from ..wire.plan import RefitPlan, TensorPlan
from ..wire.sent_names import one_by_one, why_not_in_plan
from .shards import LocalShard, like, shard_of


@dataclass
class WireStats:
    """What went by, counted while `quantize_for_refit` is consumed.

    Attributes:
        tensors, quantized: weights, and those of them that went as FP8.
        nbytes: as yielded, scales included; of shards, this rank's.
        nbytes_fp32, nbytes_bf16: what the same tensors (full ones) take unquantized.
    """

    tensors: int = 0
    quantized: int = 0
    nbytes: int = 0
    nbytes_fp32: int = 0
    nbytes_bf16: int = 0

    def count(self, name: str, tensor: Any, plan: RefitPlan) -> None:
        """One yielded tensor; a scale counts with its weight."""
        local = shard_of(name, tensor).tensor
        self.nbytes += local.nbytes
        entry = plan.tensors.get(name)
        if entry is None:
            return
        numel = math.prod(entry.shape) if entry.shape is not None else local.numel()
        self.tensors += 1
        self.quantized += entry.is_fp8_on_wire
        self.nbytes_fp32 += 4 * numel
        self.nbytes_bf16 += 2 * numel


def quantize_for_refit(
    named_tensors: Iterable[tuple[str, Any]],
    plan: RefitPlan,
    *,
    stats: WireStats | None = None,
) -> Iterator[tuple[str, Any]]:
    """Quantize what the plan's server holds in FP8; pass on the rest. Lazy, one tensor at a time.

    Args:
        named_tensors: FP32, BF16 or FP16 under checkpoint names, on any device: full tensors, of fused
            experts too; DTensors whose shards are whole blocks; or `LocalShard`.
        plan: of the server. Hand it to `RefitClient.update(..., plan=plan)` too, so that a server with
            another plan is sent nothing.
        stats: counts what goes by.

    Yields:
        `(name, codes)` e4m3fn and `(name_scale_inv or name_scale, FP32 scales)` for what is FP8 on
        the wire, of the kind that came: a DTensor gives DTensors with its placements (`full_tensors`
        gathers them). Everything else untouched; names that the engine does without (a tied
        `lm_head`, rotary tables) are left out.

    Raises:
        RefitError: a name that plan and server don't know, a shape that is not the plan's, a shard that
            cuts blocks.
        QuantizationError: NaN or Inf, or a dtype that is not cast.
    """
    singly = (item for name, sent in named_tensors for item in one_by_one(name, sent, plan))
    for name, tensor in singly:
        if why_not_in_plan(name, plan):  # the server says what becomes of it
            made = [(name, tensor)]
        elif plan.why_not_needed(name):
            continue
        else:
            made = _quantized(plan.of(name), tensor, plan)
        for one in made:
            if stats is not None:
                stats.count(*one, plan)
            yield one


def _quantized(entry: TensorPlan, tensor: Any, plan: RefitPlan) -> list[tuple[str, Any]]:
    """Codes and scale of what is FP8 on the wire, each of the kind of `tensor`; else `tensor` as it is."""
    name, shard = entry.name, shard_of(entry.name, tensor)
    shard.check_shape(name, entry.shape)
    if not entry.is_fp8_on_wire:
        return [(name, tensor)]
    assert entry.block_size is not None
    rows, columns = shard.scales_of(name, entry.block_size, tensor)
    if shard.tensor.numel():
        called = shard.called(name)
        codes, scale = quantize(shard.tensor, entry.block_size, name=called, **plan.rounding)
    else:  # a rank without rows
        codes = torch.empty_like(shard.tensor, dtype=FP8_DTYPE)
        scale = codes.new_empty(entry.scale_shape, dtype=torch.float32)[rows, columns]
    scales = LocalShard(scale, entry.scale_shape, (rows.start, columns.start))
    return [
        (name, like(tensor, LocalShard(codes, shard.full_shape, shard.start))),
        (entry.scale_name, like(tensor, scales)),
    ]
