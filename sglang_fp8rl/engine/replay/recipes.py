"""Record once, replay at every refit: the recipes of the bucket layouts that were seen before.

A recording (`native/recording.py`) of a call that succeeded becomes a recipe: one table of casts and copies. The
next bucket of the same layout is written from it, without a loader, a name lookup or any Python per tensor.
A bucket with which SGLang does anything but copy goes through its loaders at every update, whole.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...numerics.backends import TableRunner
from ...numerics.write_table import BAD_SCALE, NAN_CODE, Kind
from ..arrival.bucket import Bucket, FlatBucket
from ..interception import Write
from ..model.parameters import Target
from ..modules.method import are_no_exponents
from ..native.call import Call
from ..native.pairs import bad_scale_error, nan_code_error
from ..native.recording import Sample
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
        fills: of targets, which no sent tensor has.
        kv_scales: positions of scales of the KV cache, which are read each time.
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
    fills: list[tuple[Target, Write]]
    kv_scales: list[int]
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
                    bucket.metadata = recipe.metadata
                return recipe
        return None

    def add(self, bucket: Bucket, recipe: Recipe) -> None:
        """Keep a recipe; one of the same layout that no longer fits is replaced."""
        others = [old for old in self._recipes.get(bucket.key, ()) if old.layout != recipe.layout]
        self._recipes[bucket.key] = [*others, recipe]
        self._recipes.move_to_end(bucket.key)
        while len(self) > 1 and self.size > MAX_TENSORS:
            self._recipes.popitem(last=False)

    def forget(self) -> None:
        """Their memory is gone: what comes into the new one is recorded anew."""
        self._recipes.clear()

    def count_replayed(self, recipe: Recipe) -> None:
        self.counts.calls += 1
        self.counts.tensors += recipe.size

    def __len__(self) -> int:
        return sum(map(len, self._recipes.values()))

    @property
    def size(self) -> int:
        return sum(recipe.size for recipes in self._recipes.values() for recipe in recipes)

    def as_dict(self) -> dict[str, Any]:
        """For the status section."""
        reasons = dict(self.counts.native_reasons)
        return {"recipes": len(self), **vars(self.counts), "native_reasons": reasons}


def replay(
    call: Call,
    bucket: Bucket,
    recipe: Recipe,
    recipes: RecipeStore,
    report: RefitReport,
    load_natively: Callable[[], Any],
) -> Any:
    """Write a bucket from its recipe; one with a pair that can't be stored goes to SGLang's loaders instead.

    Returns:
        what SGLang's `load_weights` returns, where it was needed.
    """
    if not _are_exponents(bucket, recipe.exponents):
        return load_natively()  # refuses the pair by name
    for target, write in recipe.fills:
        write.destination(target.parameter).fill_(write.fill)
    flags = recipe.runner.run(bucket.addresses())
    if flags.any():
        _note_bad_pieces(call, recipe, bucket, flags)
    report.written_again(recipe.targets, recipe.regions)
    _sample(recipe, bucket, report)
    recipes.count_replayed(recipe)
    call.sources.set_aside = {bucket.names[at]: bucket.tensor(at) for at in recipe.kv_scales}
    return None


def _sample(recipe: Recipe, bucket: Bucket, report: RefitReport) -> None:
    """Measure the SQNR of one write of each granularity that wants it."""
    noise, sampled = report.refit.noise, set()
    for one in recipe.samples:
        if one.granularity not in sampled and noise.wants(one.granularity):
            sampled.add(one.granularity)
            view = one.part.of(bucket.tensor(one.position))
            noise.add(one.granularity, view, one.codes, one.scales)


def _are_exponents(bucket: Bucket, positions: tuple[int, ...]) -> bool:
    """Whether these scales of a bucket are powers of two: the table would copy any. Waits for a GPU."""
    if not positions:
        return True
    scales = torch.cat([bucket.tensor(position).reshape(-1) for position in positions])
    return not bool(are_no_exponents(scales).any())


def _note_bad_pieces(call: Call, recipe: Recipe, bucket: Bucket, flags: Any) -> None:
    """Put what the table did not write down to the names it came under."""
    table = recipe.runner.table
    for piece in table.bad_pieces(flags):
        name = bucket.names[recipe.positions[piece]]
        found = table.flags_of(flags, piece)
        if table.pieces["kind"][piece] != Kind.CODES:
            call.not_finite.append((name, torch.from_numpy(found.astype(bool))))
            continue
        codes = set(found.ravel().tolist())
        if NAN_CODE in codes:
            call.errors[name] = str(nan_code_error(name))
        if BAD_SCALE in codes:
            scale_name = bucket.names[recipe.positions[piece - 1]]
            text = str(bad_scale_error(scale_name))
            call.errors |= {name: text, scale_name: text}
