"""Record once, replay at every refit: the recipes of the bucket layouts that were seen before.

A recording (`recording.py`) of a call that succeeded becomes a recipe: one table of casts and copies. The
next bucket of the same layout is written from it, without a loader, a name lookup or any Python per tensor.
A bucket with which SGLang does anything but copy goes through its loaders at every update, whole.
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...config import Options
from ...numerics.backends import TableRunner, make_runner
from ...numerics.write_table import BAD_SCALE, NAN_CODE, CastTable, Kind
from ..arrival.bucket import Bucket, FlatBucket, overlapping
from ..interception import Write
from ..ledger.ledger import Arrived, Ledger
from ..model.parameters import Target
from ..modules.method import are_no_exponents
from ..native.call import Call
from ..native.pairs import bad_scale_error, check_exponents, nan_code_error
from ..native.tied import note_tied
from .recording import Recording

# Tensors of all recipes together: a table row of 136 bytes each, its name and its layout. Four times
# what Qwen3-235B sends as FP8 pairs.
MAX_TENSORS = 262_144
_KEPT = "SGLang keeps a tensor that was sent"


@dataclass
class Recipe:
    """How a bucket of one layout is written.

    Attributes:
        layout: of the bucket it was recorded from.
        brings: what each bucket of that layout brings.
        positions: per row of the table, the tensor it is from.
        fills: of targets, which no sent tensor has.
        kv_scales: positions of scales of the KV cache, which are read each time.
        tied: as of the call that it was recorded from.
        regions, targets: numbers of the boxes that are written, indices of the parameters.
        owners: parameters and scales that are written, and where they were.
        exponents: positions of scales that have to be powers of two.
        metadata, names: of a flattened bucket, which makes neither of them again.
    """

    layout: tuple[list, ...]
    brings: Arrived
    positions: np.ndarray
    runner: TableRunner
    fills: list[tuple[Target, Write]]
    kv_scales: list[int]
    tied: dict[int, str]
    regions: np.ndarray
    targets: np.ndarray
    owners: list[tuple[torch.Tensor, int]]
    exponents: tuple[int, ...]
    metadata: Sequence[Any]
    names: list[str]

    @property
    def size(self) -> int:
        return self.brings.tensors


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
        """The recipe of a bucket's layout; one is dropped if what it writes is no longer where it was."""
        recipes = self._recipes.get(bucket.key, [])
        recipe = next((one for one in recipes if one.layout == bucket.layout), None)
        if recipe is None:
            return None
        if any(one.data_ptr() != address for one, address in recipe.owners):
            self._recipes[bucket.key] = [one for one in recipes if one is not recipe]
            return None
        self._recipes.move_to_end(bucket.key)
        if isinstance(bucket, FlatBucket):
            bucket.metadata, bucket.names = recipe.metadata, recipe.names
        return recipe

    def add(self, bucket: Bucket, recipe: Recipe) -> None:
        """Keep the recipe of a bucket for which none was found."""
        self._recipes.setdefault(bucket.key, []).append(recipe)
        self._recipes.move_to_end(bucket.key)
        while len(self) > 1 and self.size > MAX_TENSORS:
            self._recipes.popitem(last=False)

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


def learn(
    recipes: RecipeStore,
    recording: Recording,
    ledger: Ledger,
    call: Call,
    options: Options,
) -> None:
    """After a call that succeeded: keep its recipe, or count why there is none."""
    counts = recipes.counts
    counts.native_calls += 1
    targets = np.unique(recording.boxes[:, 0])
    owners = [ledger.targets[at] for at in targets.tolist()]
    reasons = set(_why_native(recording, ledger, call, owners))
    if reasons == {_KEPT}:
        gc.collect()  # what the model forgot in a circle
        reasons = {_KEPT} if recording.is_kept() else set()
    if not reasons:
        recipe = _recipe_of(recording, call, options, targets, owners)
        if recipe is not None:
            recipes.add(recording.bucket, recipe)
            return
        reasons = {"this device has no kernels to write it with"}
    counts.native_tensors += len(recording.bucket.names)
    counts.native_reasons.update(reasons)


def _why_native(
    recording: Recording, ledger: Ledger, call: Call, owners: Sequence[Target]
) -> Iterator[str]:
    """Why buckets of this layout are left to SGLang's loaders; nothing, if all that is done with them is copying.

    All or nothing: what a model does with one tensor may depend on whether others came, and Python does not
    show that.
    """
    yield from call.sources.native.values()
    yield from call.sources.unsourced
    if recording.is_kept():
        yield _KEPT
    if ledger.coverage.overlap(recording.boxes[:, 1]):
        yield "two tensors of it are written to one place"
    parameters = [one.parameter for one in owners]
    if len({one.device for one in parameters}) > 1:
        yield "its parameters are on several devices"
    if overlapping(parameters).any():
        yield "two parameters of it share memory"


def _recipe_of(
    recording: Recording,
    call: Call,
    options: Options,
    targets: np.ndarray,
    owners: Sequence[Target],
) -> Recipe | None:
    """The recipe of a call in which all was copied; None without kernels for the device.

    Args:
        targets: numbers of the `owners` of what is written.
    """
    bucket = recording.bucket
    pairs = ((one.parameter, one.scale) for one in owners)
    memory = tuple(tensor for pair in pairs for tensor in pair if tensor is not None)
    runner = make_runner(
        CastTable(recording.rows, memory),
        owners[0].parameter.device if owners else torch.device("cpu"),
        pow2_scale=options.use_weight_pow2_scale,
        round_to_bf16=options.round_to_bf16,
    )
    if runner is None:
        return None
    aside = set(call.kv_scales)
    return Recipe(
        layout=bucket.layout,
        brings=call.brought,
        positions=recording.of_rows,
        runner=runner,
        fills=recording.fills,
        kv_scales=[at for at, name in enumerate(bucket.names) if name in aside] if aside else [],
        tied=call.tied,
        regions=recording.boxes[:, 1].copy(),
        targets=targets,
        owners=[(one, one.data_ptr()) for one in memory],
        exponents=tuple(recording.exponents),
        metadata=bucket.metadata if isinstance(bucket, FlatBucket) else (),
        names=bucket.names,
    )


def replay(
    bucket: Bucket, recipe: Recipe, recipes: RecipeStore, ledger: Ledger, call: Call
) -> None:
    """Write a bucket from its recipe, in a call.

    Raises:
        RefitError: an FP8 pair that can't be served; nothing of the bucket was written.
    """
    _check_exponents(bucket, recipe.exponents)
    for target, write in recipe.fills:
        write.destination(target.parameter).fill_(write.fill)
    flags = recipe.runner.run(bucket.addresses())
    if flags.any():
        _note_bad_pieces(call, recipe, bucket, flags)
    ledger.coverage.write(recipe.targets, recipe.regions, ledger.stamp)
    recipes.count_replayed(recipe)
    for position, other in recipe.tied.items():
        note_tied(ledger, call, bucket.names[position], bucket.tensor(position), other)
    call.sources.set_aside = {bucket.names[at]: bucket.tensor(at) for at in recipe.kv_scales}


def _check_exponents(bucket: Bucket, positions: Sequence[int]) -> None:
    """Look at all scales that are served as exponents at once: the table would copy any."""
    scales = [bucket.tensor(position).reshape(-1) for position in positions]
    if scales and bool(are_no_exponents(torch.cat(scales)).any()):
        for position in positions:
            check_exponents(bucket.names[position], bucket.tensor(position))


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
