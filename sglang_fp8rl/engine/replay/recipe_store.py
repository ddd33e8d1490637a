"""Record once, replay at every refit: the recipes of the bucket layouts that were seen before.

A recording (`recording.py`) is made while the native loaders run. It becomes a recipe
(`recipe.py`) if the call succeeded; the next bucket of the same layout is written from the recipe,
without a loader, a name lookup or any Python per tensor. What only the tensors themselves can tell
stays with the native path, by name.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...config import Options
from ...numerics.write_table import BAD_SCALE, NAN_CODE, Kind
from ..arrival.bucket import Bucket, FlatBucket
from ..modules.packed_scales import are_no_exponents
from ..native.call import Call
from ..native.loader_call import LoaderCalls
from ..native.pairs import bad_scale_error, nan_code_error
from ..native.recording import Recording
from ..report.report import RefitReport
from .recipe import Recipe, recipe_of

# Tensors of all recipes together: a table row of 136 bytes each, its name and its layout. Four times
# what Qwen3-235B sends as FP8 pairs.
MAX_TENSORS = 262_144


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
        recipes = self._recipes.get(bucket.key)
        if recipes is None:
            return None
        self._recipes.move_to_end(bucket.key)
        recipe = next((recipe for recipe in recipes if recipe.fits(bucket)), None)
        if recipe is not None and isinstance(bucket, FlatBucket):
            bucket.take_metadata(recipe.metadata)
        return recipe

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

    def learn(
        self, recording: Recording, report: RefitReport, call: Call, options: Options
    ) -> None:
        """After a call that succeeded: keep its recipe, or count why there is none."""
        bucket = recording.bucket
        if bucket.key in self._never:
            return
        for source, reason in call.observer.native.items():
            recording.refuse(source.position, reason)
        for reason in call.observer.unsourced:
            recording.refuse(None, reason)
        for position, name in enumerate(bucket.names):
            if name in call.kv_scales:
                recording.refuse(position, "a scale of the KV cache, read as it comes")
            elif name not in call.touched and name not in call.unneeded:
                recording.refuse(position, "no loader was called for it by name")
        recipe = recipe_of(recording, report, call, options)
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
        counts = self.counts
        counts.calls += 1
        counts.tensors += recipe.size - len(recipe.native)
        counts.native_tensors += len(recipe.native)
        counts.native_reasons.update(recipe.native.values())

    def __len__(self) -> int:
        return sum(map(len, self._recipes.values()))

    @property
    def size(self) -> int:
        return sum(recipe.size for recipes in self._recipes.values() for recipe in recipes)

    def as_dict(self) -> dict[str, Any]:
        """For the status section."""
        counts = self.counts
        return {
            "plans": len(self),
            "calls": counts.calls,
            "tensors": counts.tensors,
            "native_calls": counts.native_calls,
            "native_tensors": counts.native_tensors,
            "native_reasons": dict(counts.native_reasons),
        }


_DEPENDS = "what SGLang's loaders do with some tensors of the bucket depends on the others"


def replay(
    call: Call,
    bucket: Bucket,
    recipe: Recipe,
    recipes: RecipeStore,
    loaders: LoaderCalls,
    load_natively: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
) -> Any:
    """Write a bucket from its recipe; what that leaves to SGLang's loaders goes to them.

    Returns:
        what SGLang's `load_weights` returns, where it was needed.
    """
    if not _are_exponents(bucket, recipe.exponents):
        return load_natively(bucket)  # refuses the pair by name
    flags = recipe.runner.run(bucket.addresses())
    if flags.any():
        _note_bad_pieces(call, recipe, bucket, flags)
    for recorded in recipe.singly:
        write = recorded.write.repeat(bucket.tensor(recorded.position))
        loaders.apply(call, recorded.target, bucket.names[recorded.position], write)
    loaders.report.written_again(recipe.targets, recipe.regions)
    _sample(recipe, bucket, loaders.report)
    recipes.count_replayed(recipe)
    result = None
    if recipe.native:
        result = load_natively(
            [(bucket.names[at], bucket.tensor(at)) for at in sorted(recipe.native)]
        )
        if call.reached.keys() - recipe.native_reach:
            recipes.give_up(bucket, _DEPENDS)
            result = load_natively(bucket)
    return result


def _sample(recipe: Recipe, bucket: Bucket, report: RefitReport) -> None:
    """Measure the SQNR of one write of each granularity that wants it."""
    noise, sampled = report.refit.noise, set()
    for source, piece in recipe.samples:
        granularity = source.target.granularity
        if granularity not in sampled and noise.wants(granularity):
            sampled.add(granularity)
            view = source.write.repeat(bucket.tensor(source.position)).source
            assert view is not None
            noise.add(granularity, view, *piece)


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
