"""The unquantized model in `transformers`, and which of its parameters each served module holds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import EvaluationError
from ...numerics.fingerprint import MASK, seed_of, tensor_number
from ...wire.plan import RefitPlan
from ..eval.gap import Precision, load_model
from .quantized_products import WeightMap
from .served_modules import ServedModule

_LAYERS = re.compile(r"^(.*?\blayers)\.(\d+)\.")


@dataclass(frozen=True)
class ReferenceModel:
    """The model as a trainer holds it, in evaluation mode.

    Attributes:
        plan, modules: of the server.
        layers: decoder layers, in their order.
        first_layers: module name to the first of `layers` that it is in; 0 where it is in none.
        fingerprint: of the values of all parameters and their names.
    """

    plan: RefitPlan
    modules: Sequence[ServedModule]
    model: Any
    layers: Sequence[torch.nn.Module]
    weights: WeightMap
    first_layers: Mapping[str, int]
    fingerprint: str

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def load_reference(
    path: str,
    plan: RefitPlan,
    modules: Sequence[ServedModule],
    *,
    device: str = "cpu",
    dtype: Precision = "float32",
) -> ReferenceModel:
    """Load a checkpoint's model for measuring.

    The weights are those that a trainer's forward pass sees: rounded to BF16, unless the plan casts
    without that step. They are computed with in `dtype`: in FP32 there is no rounding noise of BF16
    between the layers, and a CPU without instructions for BF16 is 10 to 40 times faster.

    Raises:
        EvaluationError: it can't be loaded, there is no such device, or a module of the plan has no parameter
            in this model.
    """
    as_stored = not plan.rounding["round_to_bf16"]
    model = load_model(path, "float32" if as_stored else "bfloat16", device)
    return reference_of(model.float() if dtype == "float32" else model, plan, modules)


def reference_of(model: Any, plan: RefitPlan, modules: Sequence[ServedModule]) -> ReferenceModel:
    """The parts of a loaded model. Raises `EvaluationError` as `load_reference`.

    Side effects: experts are computed one by one, so that each is a product of its own.
    """
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    by_name = {module.name: module for module in modules}
    parameters: list[tuple[torch.Tensor, ServedModule]] = []
    places: dict[str, tuple[str, int]] = {}  # of a module: the list of layers, and the first in it
    fingerprint = 0
    for name, parameter in model.named_parameters():
        fingerprint = (fingerprint + tensor_number(parameter, seed_of(name))) & MASK
        found = _LAYERS.match(name)
        place = (found.group(1), int(found.group(2))) if found else ("", 0)
        for served in _modules_of(name, parameter, model, plan) & by_name.keys():
            parameters.append((parameter, by_name[served]))
            places[served] = min(place, places.get(served, place))
    lost = [name for name in by_name if name not in places]
    if lost:
        raise EvaluationError(
            lost[0],
            f"no parameter of {type(model).__name__} has the name {by_name[lost[0]].tensors[0]!r}",
            f"{len(lost)} of {len(by_name)} FP8 modules can't be found in the transformers model",
            "Measure a model whose checkpoint transformers reads by the names that it has on disk.",
        )
    container = next((where for where, _ in places.values() if where), "")
    return ReferenceModel(
        plan=plan,
        modules=modules,
        model=model,
        layers=list(model.get_submodule(container)) if container else [],
        weights=WeightMap(parameters),
        first_layers={
            name: number if where == container else 0 for name, (where, number) in places.items()
        },
        fingerprint=f"{fingerprint:016x}",
    )


def _modules_of(name: str, parameter: torch.Tensor, model: Any, plan: RefitPlan) -> set[str]:
    """Served modules that hold a parameter, found by its names in the checkpoint."""
    if name in plan.tensors:
        return {plan.tensors[name].module}
    from transformers.core_model_loading import revert_weight_conversion

    on_meta = torch.empty_like(parameter, device="meta")
    names = revert_weight_conversion(model, {name: on_meta})
    return {plan.tensors[one].module for one in names if one in plan.tensors}
