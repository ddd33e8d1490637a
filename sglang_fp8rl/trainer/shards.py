"""What a trainer's rank holds of a tensor: all of it, a DTensor's shard, or a box it describes.

A shard can be quantized on its own where it consists of whole scale blocks. What comes out is of the
kind that went in: a tensor, a `DTensor` with the same placements, or a `LocalShard`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise, product
from operator import add
from typing import Any

import torch

from ..errors import RefitError
from ..formats.format import BlockGrid, ceil_div
from ..numerics.cast import lies_in_memory, refuse_dtype

Box = tuple[int, ...]


@dataclass(frozen=True)
class LocalShard:
    """One rank's box of a full tensor, for trainers with their own sharding (Megatron).

    Attributes:
        tensor: what this rank holds.
        full_shape: of the tensor under its checkpoint name.
        start: of the box in it, along each dimension. A column-parallel rank's rows start at
            `rank * rows`, a row-parallel rank's columns at `rank * columns`.
    """

    tensor: torch.Tensor
    full_shape: Box
    start: Box

    def __post_init__(self) -> None:
        for field in ("full_shape", "start"):  # a list is not equal to the plan's tuple
            object.__setattr__(self, field, tuple(getattr(self, field)))
        fits = len(self.full_shape) == len(self.start) == self.tensor.dim() and all(
            at >= 0 and at + size <= full
            for at, size, full in zip(self.start, self.tensor.shape, self.full_shape, strict=True)
        )
        if not fits:
            found = f"shape {tuple(self.tensor.shape)} at {self.start} of {self.full_shape}"
            remedy = "start counts rows and columns of the full tensor, not ranks."
            raise RefitError("LocalShard", found, "a shard lies inside the full tensor", remedy)

    @property
    def shape(self) -> Box:
        return tuple(self.tensor.shape)

    def called(self, name: str) -> str:
        """In an error that counts rows of this box."""
        is_part = self.shape != self.full_shape
        return f"{name}, a shard that starts at {list(self.start)}" if is_part else name

    def check_shape(self, name: str, shape: Box | None) -> None:
        """Raises `RefitError` unless it is of a tensor of this shape; None is any."""
        if shape is not None and self.full_shape != shape:
            raise RefitError(
                name,
                f"shape {self.full_shape}",
                f"the server takes the full, unsharded {shape}",
                "Send what the checkpoint has; describe a shard with LocalShard or a DTensor.",
            )

    def scales_of(self, name: str, block_size: Sequence[int], sent: Any) -> tuple[slice, slice]:
        """Its part of the scales of the full matrix, or of each; it is of `sent`. Raises `RefitError` if it cuts a block, or
        another rank's shard of a DTensor does: a rank that went on, maybe without rows, would wait in the next gather."""
        refuse_dtype(self.tensor.dtype, name)  # as the cast, which nothing comes to without rows
        grid = BlockGrid.of(self.full_shape, block_size, name)
        is_box, own = isinstance(sent, LocalShard), (self.start[-2:], self.shape[-2:])
        held, at = (sent.tensor, sent.start) if is_box else (sent, (0,) * len(self.shape))
        if hasattr(held, "full_tensor"):
            own = _first_cut(grid, at, held.shape, held.device_mesh.shape, held.placements) or own
        remedy = "Gather it first (tensor.full_tensor()), or shard on multiples of the block."
        return grid.scales_of(*own, name=name, error=RefitError, remedy=remedy)


def shard_of(name: str, sent: Any) -> LocalShard:
    """A tensor, a DTensor or a `LocalShard` as the box that this rank holds, detached. Raises `RefitError` for
    anything else, what has no memory of its own, and a DTensor with placements that are no boxes."""
    if isinstance(sent, LocalShard):
        held = shard_of(name, sent.tensor)  # a DTensor's is a box of that box
        start = tuple(map(add, sent.start, held.start))
        return replace(sent, tensor=held.tensor, start=start)
    if hasattr(sent, "full_tensor"):
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as box_of

        # By exact class: a strided shard's rows lie apart, and a partial sum is no weight yet.
        if any(type(one) not in (Shard, Replicate) for one in sent.placements):
            rule = "shards are boxes: Shard(dim) or Replicate() on every mesh dimension"
            raise _gather_first(name, tuple(sent.placements), rule)
        local, full_shape = shard_of(name, sent.to_local()).tensor, tuple(sent.shape)
        shape, start = box_of(full_shape, sent.device_mesh, sent.placements)
        if shape != local.shape:
            raise _gather_first(name, tuple(local.shape), f"{full_shape} is cut into {shape}")
        return LocalShard(local, full_shape, start)
    if hasattr(sent, "trigger_wait"):
        sent = sent.wait()  # what a collective is still bringing
    is_strided = isinstance(sent, torch.Tensor) and sent.layout is torch.strided
    if not is_strided or (sent.numel() and not lies_in_memory(sent)):
        found = f"a {type(sent).__name__}" + " with no elements in its memory" * is_strided
        rule = "what is sent is a dense tensor, a DTensor or a LocalShard"
        remedy = "Look at what the iterator yields: on meta, wrapped, or freed as FSDP frees what it gathered."
        raise RefitError(name, found, rule, remedy)
    return LocalShard(sent.detach(), tuple(sent.shape), (0,) * sent.dim())


def like(sent: Any, made: LocalShard) -> Any:
    """`made` of `sent`, as its kind: a tensor, a DTensor with the same placements, or a `LocalShard`."""
    if isinstance(sent, LocalShard):
        return made
    if not hasattr(sent, "full_tensor"):
        return made.tensor
    from torch.distributed.tensor import DTensor

    full = torch.empty(made.full_shape, device="meta")
    return DTensor.from_local(
        made.tensor,
        sent.device_mesh,
        sent.placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


@lru_cache  # of thousands of experts that have one shape and lie on as many ranks
def _first_cut(grid: BlockGrid, at: Box, shape: Box, mesh: Box, placements: Any) -> Any:
    """Start and shape, in rows and columns, of the first rank's box that is not whole blocks, as torch cuts a DTensor."""
    bounds = [[first, first + size] for first, size in zip(at, shape, strict=True)]
    for ranks, placed in zip(mesh, placements, strict=True):
        if placed.is_shard():
            *_, end = along = bounds[placed.dim]
            cut = (range(a, z, ceil_div(z - a, ranks) or 1) for a, z in pairwise(along))
            bounds[placed.dim] = [*chain(*cut), end]
    boxes = product(*map(pairwise, bounds[-2:]))
    found = (tuple(zip(*((a, z - a) for a, z in box), strict=True)) for box in boxes)
    return next((box for box in found if not grid.is_whole(*box)), None)


def _gather_first(name: str, found: object, rule: str) -> RefitError:
    remedy = "Gather it first (tensor.full_tensor())."
    return RefitError(name, f"a DTensor with {found}", rule, remedy)


def full_tensors(named_tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather DTensors, one by one; every rank of their mesh has to go through it. FP8 travels as bytes, which
    every backend can gather. Raises `RefitError` for a `LocalShard`, which knows no mesh."""
    for name, tensor in named_tensors:
        if isinstance(tensor, LocalShard):
            rule = "it knows no mesh to gather over"
            raise RefitError(name, "a LocalShard", rule, "Gather it yourself, and use assemble().")
        if not hasattr(tensor, "full_tensor"):
            yield name, tensor
        elif tensor.element_size() == 1:
            yield name, tensor.view(torch.uint8).full_tensor().view(tensor.dtype)
        else:
            yield name, tensor.full_tensor()


def assemble(name: str, shards: Iterable[LocalShard]) -> torch.Tensor:
    """The full tensor from the boxes of all ranks (overlaps are replicas). Raises `RefitError` if they are of
    different tensors, differ where they overlap, or leave a part out."""
    parts = [shard_of(name, one) for one in shards]
    shapes = {(part.full_shape, part.tensor.dtype) for part in parts}
    if len(shapes) != 1:
        raise RefitError(name, f"shards of {shapes}", "all are of one tensor", "Mend the gather.")
    first = parts[0]
    # As integers: of FP8, and of a NaN, values can't be compared.
    bits, device = _BITS[first.tensor.itemsize], first.tensor.device
    full = torch.empty(first.full_shape, dtype=bits, device=device)
    seen = torch.zeros(first.full_shape, dtype=torch.bool, device=device)
    for part in parts:
        box = tuple(
            slice(at, at + size) for at, size in zip(part.start, part.tensor.shape, strict=True)
        )
        came, before = part.tensor.resolve_neg().view(bits).to(device), seen[box]
        if bool((before & (full[box] != came)).any()):
            rule = "shards that overlap are replicas of each other"
            raise RefitError(name, f"other values at {part.start}", rule, "Mend the gather.")
        full[box] = came
        seen[box] = True
    if not bool(seen.all()):
        found = f"{int((~seen).sum())} of {math.prod(first.full_shape)} values are in no shard"
        rule = "the shards of all ranks make the whole tensor"
        raise RefitError(name, found, rule, "Gather over all ranks that hold a part of it.")
    return full.view(first.tensor.dtype)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
