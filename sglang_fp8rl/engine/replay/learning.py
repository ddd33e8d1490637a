"""The recipe that a recording becomes, or why there is none."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from ...config import Options
from ...numerics.backends import make_runner
from ...numerics.write_table import CastTable
from ..arrival.bucket import FlatBucket
from ..interception import extent_of, storage_of
from ..model.parameters import Target
from ..native.call import Call
from ..native.recording import Recording
from ..report.report import RefitReport
from .recipes import Recipe, RecipeStore

_KEPT = "SGLang keeps a tensor that was sent"


def learn(
    recipes: RecipeStore,
    recording: Recording,
    report: RefitReport,
    call: Call,
    options: Options,
) -> None:
    """After a call that succeeded: keep its recipe, or count why there is none."""
    counts = recipes.counts
    counts.native_calls += 1
    targets = np.unique(recording.boxes[:, 0])
    owners = [report.targets[at] for at in targets.tolist()]
    reasons = set(_why_native(recording, report, call, owners))
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
    recording: Recording, report: RefitReport, call: Call, owners: Sequence[Target]
) -> Iterator[str]:
    """Why buckets of this layout are left to SGLang's loaders; nothing, if all that is done with them is copying.

    All or nothing: what a model does with one tensor may depend on whether others came, and Python does not
    show that.
    """
    yield from recording.refused
    yield from call.observer.native.values()
    yield from call.observer.unsourced
    if recording.waiting:
        yield "half of an FP8 pair, the other is in another bucket"
    known = {*call.touched, *call.unneeded, *call.kv_scales}
    if not known.issuperset(recording.bucket.names):
        yield "no loader was called by name for some of it"
    if recording.is_kept():
        yield _KEPT
    if report.coverage.overlap(recording.boxes[:, 1]):
        yield "two tensors of it are written to one place"
    parameters = [one.parameter for one in owners]
    if len({one.device for one in parameters}) > 1:
        yield "its parameters are on several devices"
    spans = sorted((storage_of(one), *extent_of(one)) for one in parameters)
    if any(one == two and start < end for (one, _, end), (two, start, _) in pairwise(spans)):
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
    memory = [tensor for one in owners for tensor in (one.parameter, one.scale)]
    runner = make_runner(
        CastTable.of_rows(recording.rows, tuple(one for one in memory if one is not None)),
        owners[0].parameter.device if owners else torch.device("cpu"),
        pow2_scale=options.use_weight_pow2_scale,
        round_to_bf16=options.round_to_bf16,
    )
    if runner is None:
        return None
    assert call.brings is not None
    aside = set(call.kv_scales)
    return Recipe(
        layout=bucket.layout,
        brings=call.brings._replace(has_taken=bool(call.touched)),
        positions=recording.of_rows,
        runner=runner,
        fills=recording.fills,
        kv_scales=[at for at, name in enumerate(bucket.names) if name in aside] if aside else [],
        regions=recording.boxes[:, 1].copy(),
        targets=targets,
        samples=recording.samples,
        owners=[(one.parameter, one.parameter.data_ptr()) for one in owners],
        exponents=tuple(recording.exponents),
        metadata=bucket.metadata if isinstance(bucket, FlatBucket) else (),
    )
