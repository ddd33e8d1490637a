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

from ..errors import RefitError
from ..numerics import FP8_DTYPE, quantize
from ..numerics.grid import BlockGrid, ScaleGranularity, granularity_of
from ..wire.pair import PAIR_SUFFIX, pack_pair
from ..wire.plan import RefitPlan, TensorPlan
from ..wire.sent_names import kv_scale_name, one_by_one
from .shards import Piece, piece_of


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
        local = piece_of(name, tensor).local
        self.nbytes += local.nbytes
        entry = plan.tensors.get(name.removesuffix(PAIR_SUFFIX))
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
    pack_pairs: bool = False,
    stats: WireStats | None = None,
) -> Iterator[tuple[str, Any]]:
    """Quantize what the plan's server holds in FP8; pass on the rest. Lazy, one tensor at a time.

    Args:
        named_tensors: FP32, BF16 or FP16 under checkpoint names: full tensors; DTensors whose
            shards are whole blocks; or `LocalShard`. On any device. Full tensors of fused experts
            are taken apart.
        plan: of the server (`fetch_plan`). Hand it to `RefitClient.update(..., plan=plan)` too, so
            that a server with another plan is sent nothing.
        pack_pairs: send a weight and its scale as one tensor (`wire/pair.py`), for trainers whose
            calls stand alone (veRL): no bucket boundary can part them. Full tensors only.
        stats: counts what goes by.

    Yields:
        `(name, codes)` e4m3fn and `(name_scale_inv or name_scale, FP32 scales)` for what is FP8 on
        the wire; everything else untouched. Of the kind that came: a DTensor gives DTensors with
        its placements (`full_tensors` gathers them), a LocalShard gives LocalShards. Names that the
        engine does without (a tied `lm_head`, rotary tables) are left out; scales of the KV cache pass.

    Raises:
        RefitError: a name that the plan doesn't know, a shape that is not the plan's, a shard that
            cuts blocks.
        QuantizationError: NaN or Inf, or a dtype that is not cast.
    """
    stream = _quantized(named_tensors, plan)
    if pack_pairs:
        stream = _packed(stream, plan)
    for name, tensor in stream:
        if stats is not None:
            stats.count(name, tensor, plan)
        yield name, tensor


def _quantized(
    named_tensors: Iterable[tuple[str, Any]], plan: RefitPlan
) -> Iterator[tuple[str, Any]]:
    singly = (item for name, sent in named_tensors for item in one_by_one(name, sent, plan))
    for name, tensor in singly:
        if kv_scale_name(name) is not None:  # the server says what becomes of it
            yield name, tensor
            continue
        if plan.why_not_needed(name):
            continue
        entry = plan.of(name)
        piece = piece_of(name, tensor)
        _check_shape(entry, piece)
        if not entry.is_fp8_on_wire:
            yield name, tensor
            continue
        codes, scale = quantize_piece(entry, piece, plan)
        yield name, piece.like(codes, piece.full_shape, piece.start, name)
        grid = _granularity(entry, plan).grid(piece.full_shape)
        start = tuple(part.start for part in grid.scales_of(piece.start, piece.shape, name=name))
        yield entry.scale_name, piece.like(scale, entry.scale_shape, start, entry.scale_name)


def _packed(stream: Iterable[tuple[str, Any]], plan: RefitPlan) -> Iterator[tuple[str, Any]]:
    """Each full weight and the scale behind it as one tensor; everything else as it is."""
    items = iter(stream)
    for name, tensor in items:
        if name not in plan.tensors or not plan.of(name).is_fp8_on_wire:
            yield name, tensor
            continue
        _, scale = next(items)
        if type(tensor) is not torch.Tensor:
            raise RefitError(
                name,
                f"a {type(tensor).__name__}",
                "only full weights are packed with their scales",
                "Gather shards first: full_tensors(quantize_for_refit(...)), or leave pack_pairs out.",
            )
        yield name + PAIR_SUFFIX, pack_pair(tensor, scale)


def quantize_piece(
    entry: TensorPlan, piece: Piece, plan: RefitPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a full tensor or of a shard that consists of whole blocks.

    Returns:
        e4m3fn of the piece's shape, and FP32 `[row blocks, column blocks]` of the piece.

    Raises:
        RefitError, QuantizationError: as `quantize_for_refit`.
    """
    granularity = _granularity(entry, plan)
    grid = granularity.grid(piece.full_shape)
    piece.check_on_blocks(entry.name, grid)
    source = piece.local
    if not source.numel():  # a rank without rows
        scale_shape = BlockGrid((source.shape[0], source.shape[1]), grid.block).scale_shape
        codes = torch.empty(source.shape, dtype=FP8_DTYPE, device=source.device)
        return codes, torch.empty(scale_shape, dtype=torch.float32, device=source.device)
    return quantize(source, granularity, name=entry.name, **plan.rounding)


def _granularity(entry: TensorPlan, plan: RefitPlan) -> ScaleGranularity:
    return granularity_of(entry.scheme, plan.block_size)


def _check_shape(entry: TensorPlan, piece: Piece) -> None:
    if entry.shape is not None and piece.full_shape != entry.shape:
        raise RefitError(
            entry.name,
            f"shape {piece.full_shape}",
            f"the server takes the full, unsharded {entry.shape}",
            "Send what the checkpoint has; describe a shard with LocalShard or a DTensor.",
        )
