"""Record once, replay at every refit: the recipes of the bucket layouts that were seen before.

A recording (`native/recording.py`) is made while the native loaders run. It becomes a recipe if the call
succeeded: one table of casts and copies. The next bucket of the same layout is written from it, without a
loader, a name lookup or any Python per tensor. What only the tensors themselves can tell stays with the
native path, by name.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from ...config import Options
from ...numerics.runners import TableRunner, make_runner
from ...numerics.write_table import CastTable
from ..arrival.bucket import Bucket, FlatBucket
from ..native.call import Call
from ..native.recording import Recording, Sample
from ..report.report import Arrived, RefitReport

# Tensors of all recipes together: a table row of 136 bytes each, its name and its layout. Four times
# what Qwen3-235B sends as FP8 pairs.
MAX_TENSORS = 262_144


@dataclass
class Recipe:
    """How a bucket of one layout is written.

    Attributes:
        layout: of the bucket it was recorded from.
        brings: what each bucket of that layout brings.
        positions: per row of the table, the tensor it is from.
        native: positions that take the native path, with the reason.
        native_reach: where their writes went when the whole bucket took it.
        regions, targets: numbers of the boxes that are written, indices of the parameters.
        samples: writes to measure the SQNR on.
        owners: parameters, and where they were.
        exponents: positions of scales that have to be powers of two.
        metadata: of a flattened bucket.
    """

    layout: tuple[list, ...]
    brings: Arrived
    positions: np.ndarray
    runner: TableRunner
    native: dict[int, str]
    native_reach: set[tuple]
    regions: np.ndarray
    targets: np.ndarray
    samples: list[Sample]
    owners: list[tuple[torch.Tensor, int]]
    exponents: tuple[int, ...]
    metadata: Sequence[Any]

    @property
    def size(self) -> int:
        return len(self.brings.numbers)


@dataclass
class ReplayCounts:
    """What was replayed and what was not, since the start."""

    calls: int = 0
    tensors: int = 0
    native_calls: int = 0
    native_tensors: int = 0
    native_reasons: Counter[str] = field(default_factory=Counter)


class RecipeStore:
    """Recipes by layout: few of them, the one longest unused goes first."""

    def __init__(self) -> None:
        self._recipes: OrderedDict[tuple, list[Recipe]] = OrderedDict()
        self._never: set[tuple] = set()
        self.counts = ReplayCounts()

    def find(self, bucket: Bucket) -> Recipe | None:
        """The recipe of a bucket's layout, if the parameters are where they were."""
        recipes = self._recipes.get(bucket.key)
        if recipes is None:
            return None
        self._recipes.move_to_end(bucket.key)
        for recipe in recipes:
            if bucket.layout == recipe.layout and all(
                parameter.data_ptr() == address for parameter, address in recipe.owners
            ):
                if isinstance(bucket, FlatBucket):
                    bucket.take_metadata(recipe.metadata)
                return recipe
        return None

    def add(self, bucket: Bucket, recipe: Recipe) -> None:
        """Keep a recipe; one of the same layout that no longer fits is replaced."""
        others = [old for old in self._recipes.get(bucket.key, ()) if old.layout != recipe.layout]
        self._recipes[bucket.key] = [*others, recipe]
        self._recipes.move_to_end(bucket.key)
        while len(self) > 1 and self.size > MAX_TENSORS:
            self._recipes.popitem(last=False)

    def give_up(self, bucket: Bucket, reason: str) -> None:
        """Buckets like this one are left to SGLang's loaders from now on."""
        self._recipes.pop(bucket.key, None)
        self._never.add(bucket.key)
        self.counts.native_reasons[reason] += 1

    def forget(self) -> None:
        """What was written once and is not written again is gone with the memory."""
        self._recipes.clear()

    def learn(
        self, recording: Recording, report: RefitReport, call: Call, options: Options
    ) -> None:
        """After a call that succeeded: keep its recipe, or count why there is none."""
        bucket = recording.bucket
        if bucket.key in self._never:
            return
        for source, reason in call.observer.native.items():
            recording.refuse(source, reason)
        for reason in call.observer.unsourced:
            recording.refuse(None, reason)
        for position, name in enumerate(bucket.names):
            if name in call.kv_scales:
                recording.refused.setdefault(position, "a scale of the KV cache, read as it comes")
            elif name not in call.touched and name not in call.unneeded:
                recording.refused.setdefault(position, "no loader was called for it by name")
        recipe = _recipe_of(recording, report, call, options)
        self.counts.native_calls += 1
        if recipe is not None:
            self.add(bucket, recipe)
        else:
            whole = recording.refused.get(-1)
            reasons = call.observer.unsourced or [whole] if whole else recording.refused.values()
            self.counts.native_reasons.update(
                set(reasons) or {"two tensors of it are written to one place"}
            )

    def count_replayed(self, recipe: Recipe) -> None:
        self.counts.calls += 1
        self.counts.tensors += recipe.size - len(recipe.native)
        self.counts.native_tensors += len(recipe.native)
        self.counts.native_reasons.update(recipe.native.values())

    def __len__(self) -> int:
        return sum(map(len, self._recipes.values()))

    @property
    def size(self) -> int:
        return sum(recipe.size for recipes in self._recipes.values() for recipe in recipes)

    def as_dict(self) -> dict[str, Any]:
        """For the status section."""
        return {"recipes": len(self), **asdict(self.counts)}


def _recipe_of(
    recording: Recording, report: RefitReport, call: Call, options: Options
) -> Recipe | None:
    """The recipe that a successful call was recorded for; None if it can't be replayed at all.

    It can't where writes go to several devices, or their boxes overlap.
    """
    if -1 in recording.refused:
        return None
    bucket, native = recording.bucket, _native_of(recording)
    rows, of_rows, boxes = recording.rows, recording.of_rows, recording.boxes
    if native:
        left = list(native)
        is_ours = ~np.isin(of_rows[:, 0], left)
        rows, of_rows = rows[is_ours], of_rows[is_ours]
        boxes = boxes[~np.isin(boxes[:, 0], left)]
    devices = {recording.targets[at].parameter.device for at in np.unique(of_rows[:, 1]).tolist()}
    if report.coverage.overlap(boxes[:, 2]) or len(devices) > 1:
        return None
    targets = np.unique(boxes[:, 1])
    owners = [recording.targets[at] for at in targets.tolist()]
    memory = [tensor for one in owners for tensor in (one.parameter, one.scale)]
    runner = make_runner(
        CastTable.of_rows(rows, tuple(tensor for tensor in memory if tensor is not None)),
        devices.pop() if devices else torch.device("cpu"),
        pow2_scale=options.use_weight_pow2_scale,
        round_to_bf16=options.round_to_bf16,
    )
    if runner is None:
        return None
    assert call.brings is not None
    return Recipe(
        layout=bucket.layout,
        brings=call.brings._replace(has_taken=bool(call.touched)),
        positions=of_rows[:, 0].copy(),
        runner=runner,
        native=native,
        native_reach={
            place
            for place, sources in call.reached.items()
            if any(source.position in native for source in sources)
        },
        regions=boxes[:, 2].copy(),
        targets=targets,
        samples=[one for one in recording.samples if one.position not in native],
        owners=[(one.parameter, one.parameter.data_ptr()) for one in owners],
        exponents=tuple(
            pair.scale
            for pair in recording.pairs
            if pair.takes_exponents and pair.weight not in native
        ),
        metadata=bucket.metadata if isinstance(bucket, FlatBucket) else (),
    )


def _native_of(recording: Recording) -> dict[int, str]:
    """What stays native, with the reason: of a pair both halves or neither."""
    native = dict(recording.refused)
    for position, count in recording.waiting.items():
        if count:
            native.setdefault(position, "half of an FP8 pair, the other is in another bucket")
    pairs = [(one.weight, one.scale) for one in recording.pairs]
    while any((weight in native) != (scale in native) for weight, scale in pairs):
        for weight, scale in pairs:
            reason = native.get(weight) or native.get(scale)
            if reason is not None:
                native.setdefault(weight, reason)
                native.setdefault(scale, reason)
    return native
