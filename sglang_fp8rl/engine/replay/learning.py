"""The recipe that a recording becomes, or why there is none."""

from __future__ import annotations

import numpy as np
import torch

from ...config import Options
from ...numerics.backends import make_runner
from ...numerics.write_table import CastTable
from ..arrival.bucket import FlatBucket
from ..native.call import Call
from ..native.recording import Recording
from ..report.report import RefitReport
from .recipes import Recipe, RecipeStore


def learn(
    recipes: RecipeStore,
    recording: Recording,
    report: RefitReport,
    call: Call,
    options: Options,
) -> None:
    """After a call that succeeded: keep its recipe, or count why there is none."""
    bucket = recording.bucket
    if bucket.key in recipes.never:
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
    recipe = recipe_of(recording, report, call, options)
    recipes.counts.native_calls += 1
    if recipe is not None:
        recipes.add(bucket, recipe)
    else:
        whole = recording.refused.get(-1)
        reasons = call.observer.unsourced or [whole] if whole else recording.refused.values()
        recipes.counts.native_reasons.update(
            set(reasons) or {"two tensors of it are written to one place"}
        )


def recipe_of(
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
