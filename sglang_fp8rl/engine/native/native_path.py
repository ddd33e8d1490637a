"""Weights through SGLang's own loaders."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ..arrival.kinds import NewBucket, Stream
from ..model.derived_weights import DerivedWeights
from ..model.fused_experts import load_left_experts
from ..model.mla_parts import load_parts_singly
from .call import Call


class NativePath:
    """The model's own `load_weights`, its tensors watched on their way.

    Side effects on the host: MLA's fused weights get a loader for each of their parts.

    Args:
        model: as SGLang built it; its loaders are wrapped afterwards.
        derived: of the model.
    """

    def __init__(self, model: torch.nn.Module, derived: DerivedWeights) -> None:
        self._model, self._derived = model, derived
        self._load_weights = load_parts_singly(model)

    def write(self, call: Call, arrival: Stream | NewBucket, *args: Any, **kw: Any) -> Any:
        """Returns what SGLang's `load_weights` returns."""
        with self._derived.in_place() if call.scope.is_serving else nullcontext():
            result = self._load_weights(call.sources.watch(arrival), *args, **kw)
            load_left_experts(self._model, call.sources.left(), self._load_weights)
        return result
