"""Norms of Gemma's kind, which Qwen3-Next and Qwen3.5 have too: SGLang keeps `weight + 1` beside their weight.

It makes that in the weight's loader, and a bucket with which a loader does more than copy is never replayed. So the loader
only copies here; behind each call SGLang's own runs once more, on the weight as it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..interception import unwatched
from .parameters import loader_of, set_loader


class GemmaNorms:
    """Those of one model.

    Side effects on the host: their `weight_loader` is SGLang's default.

    Attributes:
        places: what is kept, `module.attribute`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from sglang.srt.layers.layernorm import GemmaRMSNorm
        from sglang.srt.model_loader.weight_utils import default_weight_loader

        self.places: set[str] = set()
        self._loaders: list[tuple[torch.nn.Parameter, Callable[..., Any]]] = []
        for name, module in model.named_modules():
            if not isinstance(module, GemmaRMSNorm):
                continue
            loader = loader_of(module.weight)
            if getattr(loader, "__func__", None) is GemmaRMSNorm._weight_loader:
                self._loaders.append((module.weight, loader))
                self.places.add(f"{name}.gemma_weight")
                set_loader(module.weight, default_weight_loader)

    def derive(
        self, is_written: Callable[[torch.nn.Parameter], bool] = lambda weight: True
    ) -> None:
        """Make again what is kept of these weights."""
        with torch.no_grad(), unwatched():
            for weight, loader in self._loaders:
                if is_written(weight):
                    loader(weight, weight.data)
