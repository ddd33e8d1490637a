"""Which parameters of a model a plan's server holds in FP8, and by which rule each.

The plan knows checkpoints' names (`q_proj`, not `qkv_proj`; one expert at a time), a model its own: both
are the same but for experts that `transformers` holds in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ...errors import Fp8RlError, RefitError, is_of_an_adapter, near_matches
from ...wire.plan import UNUSED, RefitPlan, TensorPlan
from ...wire.sent_names import one_by_one

# What wrappers put between the names of modules.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")


class ServedWeightsError(Fp8RlError):
    """A model that can't compute as the plan's server does."""


def plain_name(name: str) -> str:
    """The name of a module or parameter without what wrappers put into it."""
    return _WRAPPERS.sub("", name).lstrip(".")


def is_below(name: str, modules: Collection[str]) -> bool:
    """Whether `name` is one of these modules, or in one."""
    return any(name == module or name.startswith(module + ".") for module in modules)


@dataclass(frozen=True)
class WeightRule:
    """How the server holds one parameter.

    Attributes:
        name: of the parameter, as the plan has it or would have it.
        matrices: that it consists of, each with scales of its own: 1, or of a stack `[E, N, K]` one or
            two (gate, up) for each expert.
        block: what shares one scale; per channel `[1, columns of one rank]`.
        pow2_scale, round_to_bf16: the plan's.
    """

    name: str
    matrices: int
    block: tuple[int, int]
    pow2_scale: bool
    round_to_bf16: bool


def rules_of(
    model: nn.Module, plan: RefitPlan, not_served: Collection[str]
) -> list[tuple[str, nn.Module, dict[str, WeightRule]]]:
    """The modules that compute with an FP8 weight on the plan's server, by name, with the rules of these
    weights; nothing is changed.

    Args:
        not_served: names of modules that the server has not (a value head); they stay as they are.

    Raises:
        ServedWeightsError: the plan is of another model: a name that it doesn't know, a shape that is
            not the plan's, or FP8 weights that the model has not.
    """
    found = []
    taken: set[str] = set()
    modules = {plain_name(prefix): module for prefix, module in model.named_modules()}
    for name in not_served:
        if name not in modules:
            raise ServedWeightsError(
                name,
                "in not_served, and no module of the model",
                "not_served names modules of the model",
                near_matches(name, modules) + "Name it as model.named_modules() does.",
            )
    for prefix, module in modules.items():
        weights = {}
        for leaf, parameter in module._parameters.items():
            if parameter is None or is_below(prefix, not_served):
                continue
            name = f"{prefix}.{leaf}".lstrip(".")
            entries = list(_entries(name, parameter, plan))
            rule = _rule(name, parameter, entries, plan)
            if rule is not None:
                weights[leaf] = rule
                taken.update(entry.name for entry in entries)
        if weights:
            found.append((prefix, module, weights))
    for name in (name for name in plan.tensors if plan.of(name).block_size and name not in taken):
        all_names = {plain_name(one) for one, _ in model.named_modules(remove_duplicate=False)}
        is_again = is_below(name, all_names - modules.keys())
        raise ServedWeightsError(
            name,
            f"served in FP8 and {'a second name of a module' if is_again else 'not'} in the model",
            "the model has every weight that the plan's server holds in FP8, by a module for each",
            "Hand over the whole model, and the plan of the server that samples for it."
            + " Give each name its module; they may share a parameter." * is_again,
        )
    return found


def _entries(name: str, parameter: nn.Parameter, plan: RefitPlan) -> Iterator[TensorPlan]:
    """Of the plan, for each matrix of a parameter; none for one that the server does without."""
    stand_in = torch.empty(parameter.shape, device="meta")  # of all ranks together
    for one, part in one_by_one(name, stand_in, plan):
        if plan.why_not_needed(one):
            continue
        try:
            entry = plan.of(one)
        except RefitError as error:
            more = " A module that the server has not (a value head) belongs into not_served."
            remedy = error.remedy + ("" if is_of_an_adapter(name) else more)
            raise ServedWeightsError(name, error.value, error.rule, remedy) from None
        if entry.shape is not None and entry.shape != tuple(part.shape):
            raise ServedWeightsError(
                one,
                f"shape {tuple(part.shape)} in the model, {entry.shape} in the plan",
                "the plan is of the model that is trained",
                "Fetch the plan of the server that samples for this model.",
            )
        if entry.scheme != UNUSED:
            yield entry


def _rule(
    name: str, parameter: nn.Parameter, entries: list[TensorPlan], plan: RefitPlan
) -> WeightRule | None:
    blocks = {entry.block_size for entry in entries}
    if blocks <= {None}:
        return None
    if len(blocks) > 1 or parameter.dim() not in (2, 3):
        raise ServedWeightsError(
            name,
            f"blocks {sorted(map(str, blocks))} in a parameter of shape {tuple(parameter.shape)}",
            "a parameter is one matrix, or a stack of experts that are all served by one rule",
            "Add the layer to ignored_layers on the server.",
        )
    (block,) = blocks
    assert block is not None
    experts = parameter.shape[0] if parameter.dim() == 3 else 1
    return WeightRule(name, max(experts, len(entries)), block, **plan.rounding)
