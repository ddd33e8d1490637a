"""Proof that a model computes with what its server holds.

In three steps. The model runs, and is seen computing with its weights as served. By bytes: what a weight as served
is, is the product of its parameter's codes and scales; and the fingerprint of these, and of everything that is not
FP8, is the server's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...numerics import dequantize, quantize
from ...wire.fingerprint import Fingerprint, Verification, compare
from ..fingerprint import Fingerprinter
from ..shards import full_tensors
from .modules import served
from .rules import ServedWeightsError, WeightRule, is_below, plain_name
from .run import check_run
from .swap import NOT_SERVED, plan_of, served_rules


def check_as_served(
    model: nn.Module, server: Any, *, run: Callable[[nn.Module], Any] | None = None
) -> Verification:
    """Prove that the model computes with the bytes that the server holds now.

    It runs once, in the mode and under the autocast that it is in, without gradients. Every rank of a sharded
    model has to call this: weights are gathered.

    Args:
        server: a `RefitClient`, of one of the servers that sample.
        run: calls the model so that all that is served in FP8 computes; needed where its forward takes no
            `input_ids`.

    Returns:
        What was compared. What is not FP8, and is computed with in more digits than the server has of it (norms
        of an FP32 model), is `unproven`.

    Raises:
        ServedWeightsError: the server's plan is another than the model computes by; a weight that is
            held in FP8 could not be compared; or a module, or one that reads its weight, computes with
            something else.
        RefitError: names whose bytes differ.
    """
    plan, theirs = plan_of(model), server.plan()
    if theirs.digest != plan.digest:
        raise ServedWeightsError(
            type(model).__name__,
            f"it computes by the plan {plan.digest[:15]}…, the server's is {theirs.digest[:15]}…",
            "scales are shared as the server's plan says, so the model computes by that one",
            "Call compute_as_stored(model), then compute_as_served(model, fetch_plan(url)).",
        )
    unrounded = check_run(model, run)
    found = compare(server.fingerprint(), fingerprint_of_served(model))
    found.check(type(model).__name__)
    for name, reason in found.unproven.items():
        entry = plan.tensors.get(name)
        if entry is not None and entry.block_size is not None:
            raise ServedWeightsError(
                name,
                reason,
                "every weight that is served in FP8 is compared",
                "Fetch the plan of this server: another tensor-parallel size shares other scales.",
            )
    left = found.compared - len(unrounded.keys() - found.unproven.keys())
    return replace(found, compared=left, unproven={**found.unproven, **unrounded})


def fingerprint_of_served(model: nn.Module, *, source: str = "the trainer") -> Fingerprint:
    """Of what swapped modules compute with, comparable with the server's. Raises as `check_as_served`."""
    numbers = Fingerprinter(plan_of(model))
    not_served, rules = getattr(model, NOT_SERVED), served_rules(model)
    held = ((plain_name(name), tensor) for name, tensor in model.state_dict().items())
    for name, full in full_tensors(one for one in held if not is_below(one[0], not_served)):
        if name in rules:
            _check_computed_with(full, rules[name])
        numbers.add(name, full)
    return numbers.fingerprint(source)


def _check_computed_with(weight: torch.Tensor, rule: WeightRule) -> None:
    """What `served` gives to a forward pass is codes times scales, of the public cast."""
    options: Any = {"pow2_scale": rule.pow2_scale, "round_to_bf16": rule.round_to_bf16}
    columns = weight.shape[-1]
    used = served(weight, rule).reshape(-1, columns).chunk(rule.matrices)
    for one, computed in zip(weight.reshape(-1, columns).chunk(rule.matrices), used, strict=True):
        codes, scales = quantize(one, rule.block, name=rule.name, **options)
        expected = dequantize(codes, scales, rule.block)
        other = int((expected.view(torch.int16) != computed.view(torch.int16)).sum())
        if other:
            raise ServedWeightsError(
                rule.name,
                f"{other} of {expected.numel()} values that are computed with are not the cast's",
                "what is computed with is codes times scales, rounded once to BF16",
                "Report it with the device and the dtype; numerics.through_fp8 takes a backend.",
            )
