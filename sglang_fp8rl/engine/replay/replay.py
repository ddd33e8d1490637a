"""Write a bucket from its recipe; what that leaves to SGLang's loaders goes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...numerics.write_table import BAD_SCALE, NAN_CODE, Kind
from ..arrival.bucket import Bucket
from ..modules.packed_scales import are_no_exponents
from ..native.call import Call
from ..native.pairs import bad_scale_error, nan_code_error
from ..report.report import RefitReport
from .recipes import Recipe, RecipeStore

_DEPENDS = "what SGLang's loaders do with some tensors of the bucket depends on the others"


def replay(
    call: Call,
    bucket: Bucket,
    recipe: Recipe,
    recipes: RecipeStore,
    report: RefitReport,
    load_natively: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
) -> Any:
    """Returns what SGLang's `load_weights` returns, where it was needed."""
    if not _are_exponents(bucket, recipe.exponents):
        return load_natively(bucket)  # refuses the pair by name
    flags = recipe.runner.run(bucket.addresses())
    if flags.any():
        _note_bad_pieces(call, recipe, bucket, flags)
    report.written_again(recipe.targets, recipe.regions)
    _sample(recipe, bucket, report)
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
    for one in recipe.samples:
        if one.granularity not in sampled and noise.wants(one.granularity):
            sampled.add(one.granularity)
            view = one.write.repeat(bucket.tensor(one.position)).source
            assert view is not None
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
