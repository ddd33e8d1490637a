"""Toys whose loads compute, read or keep: an update of theirs runs its loaders, and says why."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import nn

from tools.census.toys.copies import Default, Threads
from tools.census.toys.toy import Named, Toy


class Broadcast(Toy):
    """A row that is filled with a tensor of one element, by an operation that takes the tensor."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"a.weight": (6, 4), "b.weight": ()}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b.weight":
            self.b.weight.data.fill_(tensor)
        else:
            super().load(name, tensor)


class Zeroed(Toy):
    """gpt-oss: all ranks but the first set a sent bias to zero, in place, and load it."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor.zero_() if name == "b.weight" else tensor)


class ZeroedInPart(Toy):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b.weight":
            tensor[3:] = 0
        super().load(name, tensor)


class Overwritten(Toy):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b.weight":
            tensor[3:].copy_(torch.ones(3, 4))
        super().load(name, tensor)


class ZeroedByItsLoader(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight.weight_loader = self._load_b

    def _load_b(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        tensor[3:] = 0
        parameter.data.copy_(tensor)


class Catching(Toy):
    """A loader that catches whatever it is ended with."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight.weight_loader = self._load_b

    def _load_b(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        with contextlib.suppress(BaseException):
            parameter.data.copy_(tensor)
            parameter.data[3:].mul_(2)


class Padded(Toy):
    """DotsVLM: all tensors are collected first, then padded: each is made anew behind the last name."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"a.weight": (5, 4), "b.weight": (5, 4)}

    def load_weights(self, weights: Named) -> None:
        weights = list(weights)
        for name, tensor in weights:
            padded = torch.zeros(6, 4)
            padded[:5] = tensor
            self.load(name, padded)


class Joined(Toy):
    """MLA before its parts were taken singly: two tensors become one."""

    names = (*Toy.names, "half.0", "half.1")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"a.weight": (6, 4), "half.0": (3, 4), "half.1": (3, 4)}

    def load_weights(self, weights: Named) -> None:
        kept = {}
        for name, tensor in weights:
            if not name.startswith("half"):
                self.load(name, tensor)
                continue
            kept[name] = tensor
            if len(kept) == 2:
                self.load("b.weight", torch.cat([kept["half.0"], kept["half.1"]]))


class Computed(Toy):
    """A gain that is added to what a loader wrote, and one that is loaded plus one."""

    names = (*Toy.names, "gain")

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.gain.weight_loader = lambda parameter, loaded: parameter.data.copy_(loaded + 1)


class Added(Computed):
    def __init__(self) -> None:
        super().__init__()

        def add(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
            parameter.data.zero_()
            parameter.data.add_(loaded)

        self.gain.weight_loader = add


class Value(Toy):
    """Kimi K3: Python keeps a value that it read."""

    names = (*Toy.names, "kind")

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(), "kind": (1,)}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "kind":
            self.seen.fill_(2 * tensor.item())
        else:
            super().load(name, tensor)


class Attribute(Toy):
    """A tensor attribute that is computed anew behind the loop of every load."""

    def load_weights(self, weights: Named) -> None:
        super().load_weights(weights)
        self.doubled = 2 * self.a.weight.data


class OfWhatWasSent(Toy):
    """An attribute that is made of a sent tensor, which lands nowhere else."""

    names = (*Toy.names, "table")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(), "table": (7,)}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "table":
            self.table = tensor  # no operation of torch
        else:
            super().load(name, tensor)


class ThreadsThatRead(Threads, Value):
    pass


class DefaultBeside(Default):
    """The same, and something is computed: what is computed can't be loaded without the rest."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, 1 * tensor if name == "b.weight" else tensor)


class OneAtATime(Toy):
    """What is copied of one tensor depends on whether another one came before; nothing is computed with that."""

    def load_weights(self, weights: Named) -> None:
        came = set()
        for name, tensor in weights:
            came.add(name)
            if name == "b.weight":
                self.b.weight.data[:3] = (tensor * 2)[3:] if "a.weight" in came else tensor[:3]
            else:
                self.load(name, tensor)


class Listed(Toy):
    """A sent tensor that is kept where no module holds it, and is loaded as any other."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: dict[str, torch.Tensor] = {}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.listed[name] = tensor
        super().load(name, tensor)


class KeptByLoader(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.listed: dict[str, torch.Tensor] = {}
        self.b.weight.weight_loader = self._load_b

    def _load_b(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        self.listed["b.weight"] = tensor
        parameter.data.copy_(tensor)


class Negated(Toy):
    """Mamba2's A: what its loader copied it reads, computes with, and copies back."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight.weight_loader = self._load_b

    def _load_b(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        parameter.data.copy_(tensor)
        parameter.data.copy_(-torch.exp(parameter.float()))


class Turned(Negated):
    """What its loader copied it copies to another place, without computing anything."""

    def _load_b(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        parameter.data[3:].copy_(tensor[:3])
        parameter.data[:3].copy_(parameter.data[3:])
        parameter.data[3:].copy_(tensor[3:])


class Integers(Toy):
    """Ids that are loaded by SGLang's loader (one of them by its value), and by the model itself."""

    names = (*Toy.names, "ids", "id", "own")

    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Parameter(torch.zeros(5, dtype=torch.int32), requires_grad=False)
        self.id = nn.Parameter(torch.zeros(1, dtype=torch.int16), requires_grad=False)
        self.register_buffer("own", torch.zeros(5, dtype=torch.int32))

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "own":
            self.own.copy_(tensor)
        else:
            super().load(name, tensor)


class Halves(Toy):
    """Two names of one tensor that is made anew at each load."""

    def load_weights(self, weights: Named) -> None:
        super().load_weights(weights)
        self.low, self.high = (2 * self.a.weight.data).chunk(2)


class Merged(Toy):
    """Kimi K3: two parameters become views of one tensor that is joined at each load."""

    def load_weights(self, weights: Named) -> None:
        super().load_weights(weights)
        self.fused = torch.cat([self.a.weight.data, self.b.weight.data])
        self.a.weight.data, self.b.weight.data = self.fused[:6], self.fused[6:]


class SwappedViews(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.ring = torch.arange(8.0)
        self.front, self.back = self.ring[:4], self.ring[4:]

    def load_weights(self, weights: Named) -> None:
        super().load_weights(weights)
        self.front, self.back = self.back, self.front


class Swapped(Toy):
    """Two buffers that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("front", torch.zeros(4))
        self.register_buffer("back", torch.ones(4))

    def load_weights(self, weights: Named) -> None:
        super().load_weights(weights)
        self.front, self.back = self.back, self.front


class Refreshed(Toy):
    """Gemma's norms: a loader computes with the parameter that it has just written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("plus_one", torch.ones(6, 4), persistent=False)
        self.b.weight.weight_loader = self._load_b

    def _load_b(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        parameter.data.copy_(tensor)
        self.plus_one.copy_(self.b.weight.data).add_(1.0)


class Kept(Toy):
    """What Python makes of a parameter behind its loading, and keeps where nobody looks."""

    def load_weights(self, weights: Named) -> None:
        super().load_weights(weights)
        self.doubled = [2 * self.a.weight.data]
        self.first = self.b.weight.data[0, 0].item()


class Folded(Toy):
    """A value that Python computed is filled in; of zero, it is the one that was sent."""

    names = (*Toy.names, "gate", "door")

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.door = (nn.Parameter(torch.zeros(1), requires_grad=False) for _ in range(2))
        self.gate.weight_loader = lambda parameter, loaded: parameter.data.fill_(
            math.tanh(loaded.item())
        )

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "door":
            tensor = torch.tensor([math.tanh(tensor.item())])
        super().load(name, tensor)


class Bits(Toy):
    """A loader that copies bits, into a view of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight.weight_loader = self._load_b

    def _load_b(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        parameter.data.view(torch.int32).copy_(tensor.view(torch.int32))


class Rebound(Toy):
    """A parameter's data is replaced instead of written."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b.weight":
            self.b.weight.data = tensor.clone()
        else:
            super().load(name, tensor)


NATIVE = (
    *(Refreshed, Joined, Broadcast, Computed, Added, Value, OfWhatWasSent, Rebound, Padded, Listed),
    *(ThreadsThatRead, Zeroed, ZeroedInPart, Overwritten, ZeroedByItsLoader, Catching, Attribute),
    *(OneAtATime, DefaultBeside, KeptByLoader, Halves, Merged, Negated, Turned, Integers, Bits),
)
