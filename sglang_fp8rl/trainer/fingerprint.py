"""The fingerprint of what a server should hold, from the trainer's own weights; nothing is sent.

```
expected = fingerprint_of(model.state_dict().items(), fetch_plan(url))
```

Every weight is cast as the plan's server casts it, one at a time, and let go of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ..errors import RefitError
from ..numerics import FP8_DTYPE, quantize
from ..numerics.fingerprint import (
    MASK,
    box_number,
    plain_number,
    scaled_number,
    seed_of,
)
from ..numerics.grid import Blockwise
from ..wire.fingerprint import Fingerprint, Number, form_of
from ..wire.plan import FP8, UNUSED, RefitPlan, TensorPlan
from ..wire.sent_names import one_by_one
from .shards import LocalShard, shard_of

_SCALE_SUFFIXES = ("_scale_inv", "_scale")


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

    Raises:
        RefitError: a name that the plan doesn't know, a shape that is not the plan's, a shard that
            cuts blocks.
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
    return numbers.fingerprint(source)


class Fingerprinter:
    """Adds up what goes by, tensor by tensor; for `RefitClient.update(..., verify=True)` as well.

    Args:
        plan: of the server.
    """

    def __init__(self, plan: RefitPlan) -> None:
        self.plan = plan
        self._numbers: dict[str, Number] = {}

    def add(self, name: str, tensor: Any) -> None:
        """One tensor as it would be sent. Raises as `fingerprint_of`."""
        for one, part in one_by_one(name, tensor, self.plan):
            self._add(one, part)

    def watch(self, named_tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Pass tensors on, adding each."""
        for name, tensor in named_tensors:
            self.add(name, tensor)
            yield name, tensor

    def count(self, name: str, number: Number) -> None:
        """The number of one more box of a name, or of all of it (once more is a replica).

        Raises:
            RefitError: two replicas differ.
        """
        known = self._numbers.get(name)
        if known is not None and number.numel is not None:
            number = known + number
        elif known is not None and known != number:
            raise RefitError(
                name,
                f"{known.value:016x} and {number.value:016x}",
                "two ranks that hold all of a tensor hold the same",
                "Look at the trainer's own replicas.",
            )
        self._numbers[name] = number

    def fingerprint(self, source: str) -> Fingerprint:
        """What was added so far. The number of a part of a tensor says so in its `numel`.

        A tensor that the server's model ties to another one is held against that one's number.
        """
        numbers, differing = dict[str, Number](), dict[str, str]()
        for name in sorted(self._numbers, key=lambda name: bool(self.plan.tied_to(name))):
            number, other = self._numbers[name], self.plan.tied_to(name)
            if number.numel == math.prod(self.plan.of(other or name).shape or ()):
                number = replace(number, numel=None)
            if not other or number.numel is not None:
                numbers[name] = number
            elif numbers.setdefault(other, number) != number:
                differing[name] = f"not the same as {other}, to which the server's model ties it"
        return Fingerprint(source, numbers, differing)

    def _add(self, name: str, tensor: Any) -> None:
        weight = self._weight_of_scale(name)
        other = self.plan.tied_to(name)
        if weight is None and not other and self.plan.why_not_needed(name):
            return
        entry = self.plan.of(weight or other or name)
        if entry.scheme == UNUSED:
            return
        shard = shard_of(name, tensor)
        if weight is not None:
            seed = seed_of(weight, "scale")
            value = box_number(shard.tensor, shard.full_shape, shard.start, seed)
            self.count(weight, Number(_form_of(entry), value, 0))
            return
        shard.check_shape(name, entry.shape)
        self.count(name, _number_of(entry, shard, self.plan))

    def _weight_of_scale(self, name: str) -> str | None:
        if name in self.plan.tensors:
            return None
        weights = (name.removesuffix(suffix) for suffix in _SCALE_SUFFIXES)
        return next((one for one in weights if one != name and one in self.plan.tensors), None)


def _number_of(entry: TensorPlan, shard: LocalShard, plan: RefitPlan) -> Number:
    """Of a shard as the server would store it; of one that is FP8 already, without its scales."""
    name, local, block = entry.name, shard.tensor, entry.block_size
    full_shape, start = shard.full_shape, shard.start
    if block is None or local.dtype == FP8_DTYPE:
        served = local if block is not None else local.to(getattr(torch, entry.dtype))
        value = plain_number(name, served, full_shape, start)
    else:
        granularity = Blockwise.of(block)
        shard.check_on_blocks(name, granularity.grid(full_shape))
        value = 0
        for expert, matrix in enumerate(local if local.dim() == 3 else [local]):
            if matrix.numel():
                codes, scales = quantize(matrix, granularity, name=name, **plan.rounding)
                at = (start[0] + expert, *start[1:]) if local.dim() == 3 else start
                value += scaled_number(name, codes, scales, full_shape, at, block)
    return Number(_form_of(entry), value & MASK, local.numel())


def _form_of(entry: TensorPlan) -> str:
    return form_of(entry.dtype if entry.block_size is None else FP8, entry.block_size)
