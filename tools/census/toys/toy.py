"""A model that is loaded as most are, and what is done with it and with its like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from sglang_fp8rl.config import Options
from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.refit import ModelRefit

Named = Iterable[tuple[str, torch.Tensor]]


class Toy(nn.Module):
    """Two matrices, loaded as most of SGLang's models load theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6, bias=False)
        self.b = nn.Linear(4, 6, bias=False)
        for parameter in self.parameters():
            parameter.requires_grad = False
            nn.init.zeros_(parameter)

    names = ("a.weight", "b.weight")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: tuple(held[name].shape) for name in self.names if name in held}

    def load_weights(self, weights: Named) -> None:
        for name, tensor in weights:
            self.load(name, tensor)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        from sglang.srt.model_loader.weight_utils import default_weight_loader

        parameter = {**dict(self.named_parameters()), **dict(self.named_buffers())}[name]
        loader = getattr(parameter, "weight_loader", default_weight_loader)
        loader(parameter, tensor)


def weights(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {name: torch.randn(s, generator=generator) for name, s in model.shapes().items()}
    for name, one in found.items():
        if name in held and held[name].dtype in (torch.int16, torch.int32):
            found[name] = (one * 1000).to(torch.int64)
    return found


def attached(model: nn.Module, **options: Any) -> ModelRefit:
    """As a server that is about to load it."""
    refit = ModelRefit(model, Options(**options), {}, list)
    refit.attach()
    return refit


def loaded(kind: type[nn.Module], seed: int, **options: Any) -> ModelRefit:
    """As a server that was started on these weights."""
    model = kind()
    refit = attached(model, **options)
    model.load_weights(iter(weights(model, seed).items()))
    return refit


def unloaded(kind: type[nn.Module]) -> ModelRefit:
    """As a server whose weights are dummies: names are learnt by a probe."""
    model = kind()
    sent = [(name, one.to("meta")) for name, one in weights(model, 0).items()]
    refit = ModelRefit(model, Options(), {}, lambda: sent)
    refit.attach()
    return refit


def held(refit: ModelRefit) -> dict[str, torch.Tensor]:
    """Everything that the model's modules hold."""
    found = dict(refit.model.named_parameters()) | dict(refit.model.named_buffers())
    for prefix, module in refit.model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found[f"{prefix}.{name}"] = value
    return found


def update(refit: ModelRefit, tensors: dict[str, torch.Tensor]) -> None:
    with refit.during(Update(Origin.TENSOR)):
        refit.model.load_weights(list(tensors.items()))


def check_same(refit: ModelRefit, fresh: ModelRefit) -> None:
    expected = held(fresh)
    for name, one in held(refit).items():
        assert torch.equal(one, expected[name]), name
