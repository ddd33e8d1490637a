"""A small class for the census to judge, and what builds it there."""

from __future__ import annotations

import torch
from torch import nn

from sglang_fp8rl.config import Options
from sglang_fp8rl.engine.refit import ModelRefit


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.a.requires_grad_(False)

    def load_weights(self, weights):
        from sglang.srt.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            loader = getattr(parameters[name], "weight_loader", default_weight_loader)
            loader(parameters[name], tensor)


class Builder:
    path = ""

    def __init__(self, kind: type[nn.Module] = Plain) -> None:
        self._kind = kind

    def build(self, *, is_quantized: bool = True):
        torch.manual_seed(0)
        model = self._kind()
        if not is_quantized:
            return model, None
        refit = ModelRefit(model, Options(), {}, list)
        refit.attach()
        return model, refit

    @staticmethod
    def load(model, weights):
        model.load_weights(iter(weights))
