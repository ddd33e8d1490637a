"""A bucket of a layout seen before: its table runs in one call, its loaders do not."""

from __future__ import annotations

from typing import Any

import torch

from ...numerics.write_table import BAD_SCALE, NAN_CODE, Kind
from ..arrival.bucket import Bucket
from ..arrival.kinds import KnownBucket, Stream
from ..model.derived_weights import DerivedWeights
from ..modules.packed_scales import are_no_exponents
from ..native.call import Call
from ..native.loader_call import LoaderCalls
from ..native.native_path import NativePath
from ..native.pairs import bad_scale_error, nan_code_error
from ..report.report import RefitReport
from .recipe import Recipe
from .recipe_store import RecipeStore


class ReplayPath:
    """Writes buckets from their recipes; what a recipe leaves to the loaders goes to them."""

    def __init__(
        self,
        loaders: LoaderCalls,
        report: RefitReport,
        recipes: RecipeStore,
        derived: DerivedWeights,
        rest: NativePath,
    ) -> None:
        self._loaders, self._report, self._recipes = loaders, report, recipes
        self._derived, self._rest = derived, rest

    def write(self, call: Call, arrival: KnownBucket[Recipe]) -> Any:
        """Returns what SGLang's `load_weights` returns, where it was needed."""
        bucket, recipe = arrival.bucket, arrival.recipe
        if not _are_exponents(bucket, recipe.exponents):
            return self._rest.write(call, Stream(bucket))  # refuses the pair by name
        flags = recipe.runner.run(bucket.addresses())
        if flags.any():
            _note_bad_pieces(call, recipe, bucket, flags)
        for recorded in recipe.singly:
            write = recorded.write.repeat(bucket.tensor(recorded.position))
            name = bucket.names[recorded.position]
            self._loaders.apply(call, recorded.target, name, write)
        self._report.written_again(recipe.targets, recipe.regions)
        self._sample(recipe, bucket)
        self._recipes.count_replayed(recipe)
        result = None
        if recipe.native:
            rest = [(bucket.names[at], bucket.tensor(at)) for at in sorted(recipe.native)]
            result = self._rest.write(call, Stream(rest))
        if self._derived.is_needed:
            self._derived.refresh(bucket.names)
        return result

    def _sample(self, recipe: Recipe, bucket: Bucket) -> None:
        """Measure the SQNR of one write of each granularity that wants it."""
        noise, sampled = self._report.refit.noise, set()
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
