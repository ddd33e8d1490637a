"""Record once, replay at every refit: the recipes of the bucket layouts that were seen before.

A recording (`native/recording.py`) of a call that succeeded becomes a recipe (`recipes.py`), from which the next bucket of the
same layout is written. A bucket with which SGLang does anything but copy goes through its loaders at every update, whole.
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from ..arrival.bucket import Bucket, FlatBucket, overlapping
from ..extension import Extension, Way
from ..ledger.ledger import Ledger
from ..model.parameters import Target
from ..native.call import Call
from ..native.recording import Recording
from .recipes import Recipe, recipe_of

# Tensors of all recipes together: a table row of 136 bytes each, its name and its layout. Four times
# what Qwen3-235B sends as FP8 pairs.
MAX_TENSORS = 262_144
_KEPT = "SGLang keeps a tensor that was sent"


@dataclass
class ReplayCounts:
    """What was replayed and what was not, since the start."""

    calls: int = 0
    tensors: int = 0
    native_calls: int = 0
    native_tensors: int = 0
    native_reasons: Counter[str] = field(default_factory=Counter)


class Replay(Extension):
    """The recipes of one served model, by layout: few of them, the one longest unused goes first."""

    section = "replay"
    gauges: ClassVar = {"replayed_share": "Share of all update calls so far that were replayed."}

    def __init__(self, refit: Any) -> None:
        super().__init__(refit)
        self.counts = ReplayCounts()
        self._recipes: OrderedDict[tuple, list[Recipe]] = OrderedDict()

    def way_of(self, bucket: Bucket) -> Way | None:
        recipe = self._find(bucket) if self.refit.options.replay else None
        if recipe is None:
            return None
        return Way(recipe.brings, partial(self._replay, recipe, bucket))

    def _find(self, bucket: Bucket) -> Recipe | None:
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

    def _replay(self, recipe: Recipe, bucket: Bucket, call: Call) -> None:
        recipe.write(bucket, self.refit.ledger, call)
        self.counts.calls += 1
        self.counts.tensors += recipe.size

    def stored(self, call: Call) -> None:
        """Keep the recipe of what was recorded, or count why there is none."""
        recording, ledger = call.recording, self.refit.ledger
        if recording is None:
            return
        self.counts.native_calls += 1
        targets = np.unique(recording.boxes[:, 0])
        owners = [ledger.targets[at] for at in targets.tolist()]
        reasons = set(_why_native(recording, ledger, call, owners))
        if reasons == {_KEPT}:
            gc.collect()  # what the model forgot in a circle
            reasons = {_KEPT} if recording.is_kept() else set()
        if not reasons:
            recipe = recipe_of(recording, call, self.refit.options, targets, owners)
            if recipe is not None:
                self._keep(recording.bucket, recipe)
                return
            reasons = {"this device has no kernels to write it with"}
        self.counts.native_tensors += len(recording.bucket.names)
        self.counts.native_reasons.update(reasons)

    def _keep(self, bucket: Bucket, recipe: Recipe) -> None:
        """Keep the recipe of a bucket for which none was found."""
        self._recipes.setdefault(bucket.key, []).append(recipe)
        self._recipes.move_to_end(bucket.key)
        while len(kept := self._kept()) > 1 and sum(one.size for one in kept) > MAX_TENSORS:
            self._recipes.popitem(last=False)

    def _kept(self) -> list[Recipe]:
        return list(chain.from_iterable(self._recipes.values()))

    def status(self) -> dict[str, Any]:
        reasons = dict(self.counts.native_reasons)
        return {"recipes": len(self._kept()), **vars(self.counts), "native_reasons": reasons}

    @staticmethod
    def measured(status: Mapping[str, Any]) -> Mapping[str, float]:
        counts = status["replay"]
        if counts is None:
            return {}
        calls = counts["calls"] + counts["native_calls"]
        return {"replayed_share": counts["calls"] / calls} if calls else {}


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
