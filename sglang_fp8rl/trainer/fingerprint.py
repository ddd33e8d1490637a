"""The fingerprint of what a server should hold, from the trainer's own weights; nothing is sent.

```
expected = fingerprint_of(model.state_dict().items(), fetch_plan(url))
```

Every weight is cast as the plan's server casts it, one at a time, and let go of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import QuantizationError, RefitError
from ..formats import weight_name_of
from ..formats.format import BlockGrid
from ..numerics import FP8_DTYPE
from ..numerics.cast import cast_into, refuse_not_finite
from ..numerics.fingerprint import Box, NumberTable, scaled_boxes, seed_of
from ..wire.fingerprint import Fingerprint, Number, form_of
from ..wire.plan import FP8, UNUSED, RefitPlan, TensorPlan
from ..wire.sent_names import one_by_one, why_not_in_plan
from .shards import LocalShard, shard_of


def fingerprint_of(
    named_tensors: Iterable[tuple[str, Any]], plan: RefitPlan, *, source: str = "the trainer"
) -> Fingerprint:
    """One number for each name, equal to the server's where it holds these weights.

    Args:
        named_tensors: what `RefitClient.update` takes: FP32, BF16 or FP16 under checkpoint names, or
            quantized by `quantize_for_refit` (codes and scales). A `LocalShard` or a
            DTensor gives the number of its box; `added_up` makes the whole's of them.
        plan: of the server.
        source: what messages call it.

    Returns:
        Names that the server takes without a number (scales of a KV cache) are in its `unproven`.

    Raises:
        RefitError: a name that plan and server don't know, a shape that is not the plan's, a shard that
            cuts blocks, a part that comes twice.
        QuantizationError: NaN or Inf, or a dtype that is not cast.
    """
    numbers = Fingerprinter(plan)
    for name, tensor in named_tensors:
        numbers.add(name, tensor)
    return numbers.fingerprint(source)


def added_up(parts: Iterable[Fingerprint], plan: RefitPlan) -> Fingerprint:
    """Of a whole model, from fingerprints of disjoint shards of it (one per trainer rank)."""
    numbers = Fingerprinter(plan)
    source = ""
    for part in parts:
        source = source or part.source
        for name, number in part.numbers.items():
            numbers.count(name, number)
        numbers.unproven.update(part.unproven)
    return numbers.fingerprint(source)


def form_as_served(entry: TensorPlan) -> str:
    return form_of(entry.dtype if entry.block_size is None else FP8, entry.block_size)


class Fingerprinter:
    """Adds up what goes by, tensor by tensor, as the plan's server has it."""

    def __init__(self, plan: RefitPlan) -> None:
        self.plan = plan
        self.unproven: dict[str, str] = {}  # names that have no number, and why
        self._numbers: dict[str, Number] = {}

    def add(self, name: str, tensor: Any) -> None:
        """One tensor as it would be sent. Raises as `fingerprint_of`."""
        for one, part in one_by_one(name, tensor, self.plan):
            self._add(one, part)

    def count(self, name: str, number: Number) -> None:
        """The number of one more box of a name, or of all of it (once more is a replica). Raises `RefitError` where two
        replicas differ, and for a box behind all."""
        known = self._numbers.get(name)
        if known is not None and (known.numel is None) != (number.numel is None):
            raise _counted_again(name, "all of it and a part were counted")
        if known is not None and number.numel is not None:
            number = known + number
        elif known is not None and known != number:
            found = f"{known.value:016x} and {number.value:016x}"
            rule = "two ranks that hold all of a tensor hold the same"
            raise RefitError(name, found, rule, "Look at the trainer's own replicas.")
        self._numbers[name] = number

    def fingerprint(self, source: str) -> Fingerprint:
        """What was added so far. The number of a part of a tensor says so in its `numel`; a tensor that the server's model
        ties to another one is held against that one's number."""
        numbers, differing = dict[str, Number](), dict[str, str]()
        tied = {name: other for name in self._numbers if (other := self.plan.tied_to(name))}
        for name in (*(name for name in self._numbers if name not in tied), *tied):
            number, other = self._numbers[name], tied.get(name, "")
            whole = math.prod(self.plan.of(other or name).shape or ())
            if number.numel is not None and number.numel > whole:
                raise _counted_again(name, f"{number.numel} values were counted of {whole}")
            if number.numel == whole:
                number = Number(number.form, number.value)
            if not other or number.numel is not None:
                numbers[name] = number
            elif numbers.setdefault(other, number) != number:
                differing[name] = f"not the same as {other}, to which the server's model ties it"
        return Fingerprint(source, numbers, differing, dict(self.unproven))

    def _add(self, name: str, tensor: Any) -> None:
        weight, other = weight_name_of(name), self.plan.tied_to(name)
        is_scale = weight != name and weight in self.plan.tensors and name not in self.plan.tensors
        if not is_scale and not other and self.plan.why_not_needed(name):
            return
        if not is_scale and (reason := why_not_in_plan(name, self.plan)):
            self.unproven[name] = reason
            return
        entry = self.plan.of(weight if is_scale else other or name)
        if entry.scheme == UNUSED:
            return
        shard = shard_of(name, tensor)
        local, full_shape, start = shard.tensor, shard.full_shape, shard.start
        if is_scale:
            if len(full_shape) < len(entry.shape or ()):  # of rows, without their one column
                local, full_shape, start = local[..., None], (*full_shape, 1), (*start, 0)
            boxes, numel = [Box(local, full_shape, start, seed_of(weight, "scale"))], 0
        else:
            shard.check_shape(name, entry.shape)
            boxes, numel = self._boxes(entry, shard, tensor), local.numel()
            if entry.block_size is None and local.is_floating_point():
                _check_finite(shard.called(name), boxes[0].tensor)
        if not local.numel() and 0 not in full_shape:
            return  # a rank without rows, which has refused what the others do
        form = form_as_served(entry)
        [value] = NumberTable([boxes]).numbers()
        self.count(weight if is_scale else name, Number(form, value, numel))

    def _boxes(self, entry: TensorPlan, shard: LocalShard, sent: Any) -> list[Box]:
        """Of a shard of `sent` as the server would store it; of one that is FP8 already, without its scales."""
        name, local, block = entry.name, shard.tensor, entry.block_size
        if block is None or local.dtype == FP8_DTYPE:
            served = local if block is not None else local.to(getattr(torch, entry.dtype))
            return [Box(served, shard.full_shape, shard.start, seed_of(name))]
        shard.scales_of(name, block, sent)
        grid, scales = BlockGrid.of(local.shape, block, name), list[torch.Tensor]()
        codes = local.new_empty(local.shape, dtype=FP8_DTYPE)
        matrices = (local, codes) if local.dim() == 3 else (local[None], codes[None])
        for matrix, into in zip(*matrices, strict=True) if local.numel() else ():
            scales.append(local.new_empty(grid.scale_shape, dtype=torch.float32))
            bad = cast_into(matrix, into, scales[-1], block, name=name, **self.plan.rounding)
            refuse_not_finite(bad, grid, shard.called(name))
        return scaled_boxes(name, codes, scales, shard.full_shape, shard.start, block)


def _check_finite(name: str, served: torch.Tensor) -> None:
    """Raises `QuantizationError` for what would be served with a NaN or Inf. Waits for a GPU."""
    is_bad = ~torch.isfinite(served).all(-1).flatten()
    if bool(is_bad.any()):
        found = f"NaN or Inf in row {int(is_bad.nonzero()[0, 0])} of {len(is_bad)}"
        rule = "a server stores no row that is not finite"
        raise QuantizationError(name, found, rule, "Look at the step that produced this weight.")


def _counted_again(name: str, found: str) -> RefitError:
    rule = "each part of a tensor is counted once"
    remedy = "Leave out what comes again: a name in two files, or the shards of a replica."
    return RefitError(name, found, rule, remedy)
