"""Toys whose loads are copies: an update of theirs is replayed."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch import nn

from tools.census.toys.toy import Named, Toy


class Scalar(Toy):
    """Apertus: SGLang's default loader fills a one-element parameter with `.item()`."""

    names = (*Toy.names, "alpha", "beta")

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("beta", torch.zeros(()))


class Buffer(Toy):
    """Gemma 4, ZAYA: a buffer that the model copies into by itself."""

    names = (*Toy.names, "bias")

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(5))

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "bias":
            self.bias.copy_(tensor)
        else:
            super().load(name, tensor)


class Slices(Toy):
    """MiMo-V2's sinks: a part of a parameter's data is assigned."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b.weight":
            self.b.weight.data[2:] = tensor[2:]
            self.b.weight.data[:2] = tensor[:2]
        else:
            super().load(name, tensor)


class Beside(Toy):
    """A loader that copies into a buffer too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("beside", torch.zeros(6, 4), persistent=False)
        self.b.weight.weight_loader = self._load_b

    def _load_b(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        parameter.data.copy_(tensor)
        self.beside.copy_(tensor)


class Inner(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.transposed = self.a.weight.data.t().contiguous()

    def post_load_weights(self, weight_names: list[str] | None = None) -> None:
        assert set(weight_names or Toy.names) <= set(Toy.names)  # its own, not those of a wrapper
        self.transposed = self.a.weight.data.t().contiguous()


class Wrapped(nn.Module):
    """Kimi-VL: what is derived is derived by a model inside the model."""

    names = ("model.a.weight", "model.b.weight")
    shapes = Toy.shapes

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()

    def load_weights(self, weights: Named) -> None:
        for name, tensor in weights:
            self.model.load(name.removeprefix("model."), tensor)
        self.model.post_load_weights()


class Threads(Toy):
    """Writes that a pool's threads make, loaders and not."""

    def load_weights(self, weights: Named) -> None:
        threads = [threading.Thread(target=self.load, args=pair) for pair in list(weights)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class ThreadsOfSlices(Threads, Slices):
    pass


class Default(Toy):
    """A bias that is set to zero unless the call brings it."""

    names = (*Toy.names, "a.bias", "b.bias")

    def __init__(self) -> None:
        super().__init__()
        for one in (self.a, self.b):
            one.bias = nn.Parameter(torch.zeros(6), requires_grad=False)

    def load_weights(self, weights: Named) -> None:
        left = {"a.bias", "b.bias"}
        for name, tensor in weights:
            left.discard(name)
            self.load(name, tensor)
        for name in left:
            self.get_parameter(name).data.zero_()


class Running(Toy):
    """A loader that is called twice, and knows where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0
        self.b.weight.weight_loader = self._load_b

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b.weight":
            for half in tensor.split(3):
                self.b.weight.weight_loader(self.b.weight, half)
        else:
            super().load(name, tensor)

    def _load_b(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        parameter.data[self.at : self.at + 3].copy_(tensor)
        self.at = (self.at + 3) % 6


class FilledTail(Toy):
    """The embedding of a padded vocabulary: what a shorter one leaves is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight.weight_loader = self._load_b

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"a.weight": (6, 4), "b.weight": (4, 4)}

    def _load_b(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        parameter.data[: len(tensor)].copy_(tensor)
        parameter.data[len(tensor) :].fill_(0)


class Retrying(Toy):
    """EmbeddingGemma 2: a loader that takes no shard is called again without one."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight.weight_loader = lambda parameter, loaded: parameter.data.copy_(loaded)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name != "b.weight":
            super().load(name, tensor)
            return
        try:
            self.b.weight.weight_loader(self.b.weight, tensor, "q")
        except TypeError:
            self.load_otherwise(tensor)

    def load_otherwise(self, tensor: torch.Tensor) -> None:
        self.b.weight.weight_loader(self.b.weight, tensor)


class CopiedPastItsLoader(Retrying):
    """Experts of Transformers' models: what their loader does not take is copied past it."""

    def load_otherwise(self, tensor: torch.Tensor) -> None:
        self.b.weight.data.copy_(tensor)


class Cut(Toy):
    """MiMo-V2's sinks, and most loaders: a rank's part of whatever comes."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b.weight":
            self.b.weight.data.copy_(tensor[:6])
        else:
            super().load(name, tensor)


class NoneFirst(Toy):
    """What is made at the first load, and was None before."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: torch.Tensor | None = None

    def load_weights(self, weights: Named) -> None:
        super().load_weights(weights)
        if self.cache is None:
            self.cache = torch.zeros(3)


class Warning(Toy):
    """MiniMax-M3: what a loader raises is logged and forgotten."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        with contextlib.suppress(Exception):
            super().load(name, tensor)


class Shared(Toy):
    """Qwen3.5: two parameters are parts of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.zeros(12, 4)
        self.a.weight.data, self.b.weight.data = self.fused[:6], self.fused[6:]

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.fused[6 * (name == "b.weight") :][:6] = tensor


REPLAYED = (
    *(Toy, Scalar, Buffer, Slices, Beside, Wrapped, Threads, ThreadsOfSlices, Shared, Default),
    *(Running, FilledTail, Warning, Retrying, CopiedPastItsLoader, NoneFirst, Cut),
)
