"""What the state machine of refits runs inside a scheduler (`refit_machine.py`): one step, and a look."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from support.by_definition import quantize_blockwise
from support.engine.commands import (
    begin,
    end,
    send,
    serialized,
    status,
    to_all_ranks,
    update_from_disk,
)
from support.engine.fingerprint_commands import fingerprint
from support.engine.models import MODELS

from sglang_fp8rl.lab.testing.checkpoints import perturbed
from sglang_fp8rl.lab.testing.layouts import to_text
from sglang_fp8rl.wire.bucket import Bucket
from sglang_fp8rl.wire.handles import serialize

MODEL = MODELS["qwen3"]
NAMES = tuple(MODEL.first)
FP8_NAMES = tuple(name for name in NAMES if "_proj" in name)
VERSIONS = 4


@functools.cache
def version(number: int) -> dict[str, torch.Tensor]:
    """The weights after so many steps of training."""
    return MODEL.first if number == 0 else perturbed(MODEL.first, seed=number)


@dataclass(frozen=True)
class Step:
    """One request.

    Attributes:
        kind: `call`, `begin`, `end`, `disk` or `flush` (of the cache alone).
        names: of the tensors, in order.
        version: of the weights that they are of.
        form: `list` or `flat` (FP32), `bf16` (a list), or `pairs` (FP8 with scales, a list).
        flush: whether the client says that nothing more comes.
        fault: of `FAULTS`, at the tensor number `at`.
        path: of a checkpoint.
    """

    kind: str
    names: tuple[str, ...] = ()
    version: int = 0
    form: str = "list"
    flush: bool = True
    fault: str = ""
    at: int = 0
    path: str = ""


UNKNOWN = "model.layers.0.mlp.donw_proj.weight"
FAULTS = ("nan", "shape", "unknown", "half", "layout", "pickle", "empty")


@dataclass(frozen=True)
class Look:
    """What an engine answers, serves and says after a step, on every rank alike.

    Attributes:
        numbers: checkpoint name to the fingerprint's number.
    """

    success: bool
    message: str
    numbers: dict[str, int]
    status: dict[str, Any]


def perform(scheduler: Any, step: Step) -> Look:
    """Send what the step says, then look."""
    if step.kind == "call":
        success, message = _call(scheduler, step)
    elif step.kind == "flush":
        success, message = bool(scheduler.flush_cache()), "the cache"
    elif step.kind == "disk":
        success, message = update_from_disk(scheduler, step.path)
    else:
        success, message = {"begin": begin, "end": end}[step.kind](scheduler)
    found = fingerprint(scheduler)
    assert not found.differing, found.differing
    assert not found.unproven, found.unproven
    numbers = {name: number.value for name, number in found.numbers.items()}
    said = status(scheduler)
    del said["plan"]
    return Look(success, message, numbers, said)


def _call(scheduler: Any, step: Step) -> tuple[bool, str]:
    tensors = [] if step.fault == "empty" else _tensors(step)
    if step.form != "flat" or not tensors:
        content = serialized(tensors, serialize)
        payload = content[:24] if step.fault == "pickle" else content
        return send(scheduler, to_all_ranks(scheduler, payload), None, step.flush)
    filled = Bucket.of(tensors)
    flat, metadata = filled.flat, filled.metadata
    if step.fault == "layout":
        metadata[step.at].start_idx -= 1 << 20
    layout = to_text(metadata)
    content = serialized({"flattened_tensor": flat, "metadata": layout}, serialize)
    payload = content[:24] if step.fault == "pickle" else content
    return send(scheduler, to_all_ranks(scheduler, payload), "flattened_bucket", step.flush)


def _tensors(step: Step) -> list[tuple[str, torch.Tensor]]:
    weights = version(step.version)
    tensors: list[tuple[str, torch.Tensor]] = []
    for at, name in enumerate(step.names):
        weight, is_wrong = weights[name], at == step.at
        if is_wrong and step.fault == "nan":
            weight = weight.clone()
            weight.view(-1)[0] = float("nan")
        elif is_wrong and step.fault == "shape":
            weight = torch.ones(3, 3, 3)
        elif is_wrong and step.fault == "unknown":
            tensors.append((UNKNOWN, weight))
        if step.form == "pairs" and name in FP8_NAMES:
            codes, scale = quantize_blockwise(weight)
            tensors.append((name, codes))
            if not (is_wrong and step.fault == "half"):
                tensors.append((f"{name}_scale_inv", scale))
        else:
            tensors.append((name, weight.bfloat16() if step.form == "bf16" else weight))
    return tensors
