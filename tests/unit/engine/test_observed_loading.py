"""Whatever a model's `load_weights` does: after an update it holds what a fresh load gives, replayed or not.

The models are toys, each with one habit of a model class of SGLang's. The judge is a fresh one.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable

import pytest
import torch
from support.replayed import recipes_of
from torch import nn

from sglang_fp8rl.config import Options
from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.host.status import last_refit
from sglang_fp8rl.engine.refit import ModelRefit
from sglang_fp8rl.errors import RefitError

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


class Broadcast(Toy):
    """A row that is filled with a tensor of one element, by an operation that takes the tensor."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"a.weight": (6, 4), "b.weight": ()}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b.weight":
            self.b.weight.data.fill_(tensor)
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


class ThreadsThatRead(Threads, Value):
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


class Cut(Toy):
    """MiMo-V2's sinks, and most loaders: a rank's part of whatever comes."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b.weight":
            self.b.weight.data.copy_(tensor[:6])
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


class NoneFirst(Toy):
    """What is made at the first load, and was None before."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: torch.Tensor | None = None

    def load_weights(self, weights: Named) -> None:
        super().load_weights(weights)
        if self.cache is None:
            self.cache = torch.zeros(3)


class Swapped(Toy):
    """Two buffers that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("front", torch.zeros(4))
        self.register_buffer("back", torch.ones(4))

    def load_weights(self, weights: Named) -> None:
        super().load_weights(weights)
        self.front, self.back = self.back, self.front


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


class Rebound(Toy):
    """A parameter's data is replaced instead of written."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b.weight":
            self.b.weight.data = tensor.clone()
        else:
            super().load(name, tensor)


def weights(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {name: torch.randn(s, generator=generator) for name, s in model.shapes().items()}
    for name, one in found.items():
        if name in held and held[name].dtype in (torch.int16, torch.int32):
            found[name] = (one * 1000).to(torch.int64)
    return found


def loaded(kind: type[nn.Module], seed: int) -> ModelRefit:
    """As a server that was started on these weights."""
    model = kind()
    refit = ModelRefit(model, Options(), {}, list)
    refit.attach()
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


REPLAYED = (
    *(Toy, Scalar, Buffer, Slices, Beside, Wrapped, Threads, ThreadsOfSlices, Shared, Default),
    *(Running, FilledTail, Warning, Retrying, CopiedPastItsLoader, NoneFirst, Cut),
)
NATIVE = (
    *(Refreshed, Joined, Broadcast, Computed, Added, Value, OfWhatWasSent, Rebound, Padded, Listed),
    *(ThreadsThatRead, Zeroed, ZeroedInPart, Overwritten, ZeroedByItsLoader, Catching, Attribute),
    *(OneAtATime, DefaultBeside, KeptByLoader, Halves, Merged, Negated, Turned, Integers),
)


@pytest.mark.parametrize("kind", [*REPLAYED, *NATIVE])
def test_every_update_leaves_what_a_fresh_load_leaves(kind):
    refit = loaded(kind, 0)
    places = {name: one.data_ptr() for name, one in held(refit).items()}
    for seed in (1, 2, 3, 0):
        update(refit, weights(refit.model, seed))
        check_same(refit, loaded(kind, seed))
        assert {name: one.data_ptr() for name, one in held(refit).items()} == places


@pytest.mark.parametrize("kind", [*REPLAYED, *NATIVE])
def test_every_update_without_recipes_leaves_it_too(kind):
    refit = loaded(kind, 0)
    refit.options = refit.options.model_copy(update={"replay": False})
    for seed in (1, 2):
        update(refit, weights(refit.model, seed))
        check_same(refit, loaded(kind, seed))


@pytest.mark.parametrize("kind", REPLAYED)
def test_copies_are_replayed_whoever_makes_them(kind):
    refit = loaded(kind, 0)
    for seed in (1, 2):
        update(refit, weights(refit.model, seed))
    counts = recipes_of(refit).counts
    assert (counts.calls, counts.native_tensors) == (1, 0), counts


@pytest.mark.parametrize("kind", NATIVE)
def test_what_is_more_than_copies_is_native_and_says_why(kind):
    refit = loaded(kind, 0)
    for seed in (1, 2):
        update(refit, weights(refit.model, seed))
    counts = recipes_of(refit).counts
    assert (counts.calls, counts.native_tensors) == (0, 2 * len(refit.model.shapes())), counts
    assert counts.native_reasons


def test_what_is_kept_of_a_loaded_parameter_follows_it():
    refit = loaded(Kept, 0)
    for seed in (1, 2, 3):
        update(refit, weights(refit.model, seed))
        fresh = loaded(Kept, seed).model
        assert torch.equal(refit.model.doubled[0], fresh.doubled[0])
        assert refit.model.first == fresh.first
    assert any("reads b.weight" in why for why in recipes_of(refit).counts.native_reasons)


def test_a_fill_with_what_was_computed_is_no_copy():
    for name in ("gate", "door"):
        refit = loaded(Folded, 0)
        for value in (0.0, 0.5):
            update(refit, weights(refit.model, 1) | {name: torch.tensor([value])})
            assert getattr(refit.model, name).item() == pytest.approx(math.tanh(value))


def test_what_a_loader_fills_is_filled_again():
    refit = loaded(FilledTail, 0)
    for seed in (1, 2, 3):
        refit.model.b.weight.fill_(7)
        update(refit, weights(refit.model, seed))
        check_same(refit, loaded(FilledTail, seed))
        assert not refit.model.b.weight[4:].any()
    assert recipes_of(refit).counts.calls == 2


def test_a_tensor_is_seen_to_be_kept_where_the_one_before_it_was():
    refit, staged = loaded(Listed, 0), weights(Toy(), 1)
    for seed in (1, 2, 3):
        for name, tensor in weights(refit.model, seed).items():
            staged[name].copy_(tensor)  # a sender's buffers, each time
        update(refit, staged)
    assert not recipes_of(refit).counts.calls
    assert refit.model.listed["a.weight"].data_ptr() == staged["a.weight"].data_ptr()


def test_a_probe_leaves_what_was_none_as_it_was():
    refit = unloaded(NoneFirst)
    refit.note_loaded()
    assert refit.model.cache is None


def test_both_errors_are_told_where_the_first_is_caught():
    class Stubborn(Warning):
        def load(self, name: str, tensor: torch.Tensor) -> None:
            super().load(name, tensor)
            if tensor.dtype == torch.int8:
                raise KeyError("something else")

    refit = loaded(Stubborn, 0)
    wrong = torch.zeros(6, 4, dtype=torch.int8)
    with pytest.raises(RefitError, match=r"(?s)dtype torch.int8.*something else"):
        update(refit, weights(refit.model, 1) | {"b.weight": wrong})


def test_what_was_forgotten_in_a_circle_is_not_kept():
    class Circle(Toy):
        def load_weights(self, weights: Named) -> None:
            held: list = [list(weights)]
            held.append(held)
            super().load_weights(held[0])

    refit = loaded(Circle, 0)
    for seed in (1, 2):
        update(refit, weights(refit.model, seed))
    assert recipes_of(refit).counts.calls == 1


def test_tensors_that_share_memory_are_told_apart():
    class First(Toy):
        def load_weights(self, weights: Named) -> None:
            weights = dict(weights)
            super().load_weights(weights.items())
            self.third.copy_(weights["a.weight"])

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("third", torch.zeros(6, 4))

    refit = loaded(First, 0)
    one = weights(Toy(), 1)["a.weight"]
    update(refit, {"a.weight": one, "b.weight": one})  # tied
    update(refit, weights(Toy(), 2))
    check_same(refit, loaded(First, 2))


@pytest.mark.parametrize("kind", [Swapped, SwappedViews])
def test_values_that_change_places_are_refused_every_time(kind):
    refit = loaded(kind, 0)
    places = {name: one.data_ptr() for name, one in held(refit).items()}
    for seed in (1, 2):
        with pytest.raises(RefitError, match="in memory that another name has"):
            update(refit, weights(refit.model, seed))
        assert {name: one.data_ptr() for name, one in held(refit).items()} == places


@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
def test_what_a_model_catches_is_told_all_the_same(seeds):
    refit = loaded(Warning, 0)
    for seed in seeds:
        update(refit, weights(refit.model, seed))
    wrong = weights(refit.model, 3) | {"b.weight": torch.zeros(6, 4, dtype=torch.int8)}
    with pytest.raises(RefitError, match=r"b\.weight: dtype"):
        update(refit, wrong)


@pytest.mark.parametrize("kind", [Scalar, Buffer, OfWhatWasSent, Value])
def test_a_refit_that_leaves_out_a_scalar_or_a_buffer_is_not_complete(kind):
    refit = loaded(kind, 0)
    tensors = weights(refit.model, 1)
    for name in set(tensors) - set(Toy.names):
        rest = {key: value for key, value in tensors.items() if key != name}
        with refit.during(Update(Origin.TENSOR)):
            refit.model.load_weights(list(rest.items()))
            verdict = refit.report.verdict()
            refit.report.give_up("the test goes on")
        assert not verdict.is_complete
        assert verdict.lacking == 1


@pytest.mark.parametrize("kind", [Scalar, Buffer, Joined, OfWhatWasSent, Value])
def test_no_name_that_reaches_the_model_is_unknown_or_unused(kind):
    refit = loaded(kind, 0)
    assert set(refit.names.known) == set(refit.model.shapes())
    assert not refit.names.unused


@pytest.mark.parametrize(
    "kind",
    [one for one in (*REPLAYED, *NATIVE) if one is not Rebound],
)
def test_a_probe_learns_what_a_load_learns_and_changes_nothing(kind):
    refit = unloaded(kind)
    before = {name: (one, one.clone()) for name, one in held(refit).items()}
    refit.note_loaded()
    refit.report.start_call(Update(Origin.TENSOR), refit.report.brought.numbers_of([]))
    assert refit.report.lacking().any()
    assert list(held(refit)) == list(before)
    for name, one in held(refit).items():
        assert one is before[name][0]
        assert torch.equal(one, before[name][1])
    known = loaded(kind, 0).names.known
    found = refit.names.known
    assert {name: len(one.landings) for name, one in found.items()} == {
        name: len(one.landings) for name, one in known.items()
    }


def test_a_refit_whose_extent_can_t_be_learnt_fails_and_says_so():
    """torch does not let a parameter's data become one without values."""
    refit = unloaded(Rebound)
    refit.note_loaded()
    with refit.during(Update(Origin.TENSOR)):
        refit.model.load_weights(list(weights(refit.model, 1).items()))
    (why,) = refit.report.verdict().failures
    assert "b.weight" in why
    assert "--load-format dummy" in why
    assert not refit.names.is_filled


@pytest.mark.parametrize("kind", [Toy, Cut, Threads])
@pytest.mark.parametrize("start", [loaded, lambda kind, _: unloaded(kind)])
@pytest.mark.parametrize("shape", [(7, 4), (12, 4), (5, 4), (1, 4), (4, 6)])
def test_a_tensor_has_the_sizes_of_the_start(kind, start, shape):
    refit = start(kind, 0)
    refit.note_loaded()
    before = refit.model.b.weight.clone()
    for _ in range(2):
        with pytest.raises(RefitError, match=r"b\.weight: shape .*unsharded \(6, 4\)"):
            update(refit, {"b.weight": torch.ones(shape)})
    assert torch.equal(refit.model.b.weight, before)
    for seed in (1, 2):
        update(refit, weights(refit.model, seed))
    wrong = {"b.weight": torch.ones(shape)}
    with pytest.raises(RefitError, match=r"b\.weight: shape"):  # beside what is replayed
        update(refit, weights(refit.model, 3) | wrong)


def test_a_dimension_of_one_more_or_less_makes_no_difference():
    refit = loaded(Scalar, 0)
    update(refit, weights(refit.model, 1) | {"alpha": torch.tensor(2.0), "beta": torch.ones(1, 1)})
    assert (refit.model.alpha.item(), refit.model.beta.item()) == (2, 1)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "value"),
    [(Negated, NAN), (Negated, -INF), (Negated, 100.0), (Turned, NAN), (Turned, INF)],
)
def test_of_what_a_loader_makes_of_it_nothing_is_kept_that_is_not_finite(kind, value):
    refit = loaded(kind, 0)
    update(refit, weights(refit.model, 1))
    before, wrong = refit.model.b.weight.clone(), weights(refit.model, 2)
    wrong["b.weight"][1, 2] = value
    with pytest.raises(RefitError, match=r"b\.weight: NaN or Inf"):
        update(refit, wrong)
    assert torch.equal(refit.model.b.weight, before)
    assert not torch.equal(refit.model.a.weight, weights(refit.model, 1)["a.weight"])


WHOLE = [2**31 - 1, -(2**31), 0, 257, -3]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64])
@pytest.mark.parametrize("name", ["ids", "own"])
def test_integers_come_in_any_dtype_that_holds_them(name, dtype):
    refit = loaded(Integers, 0)
    update(refit, {name: torch.tensor(WHOLE).to(dtype)})
    assert held(refit)[name].tolist() == WHOLE


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.float32])
def test_of_narrower_integers_and_fp32_every_value_is_kept(dtype):
    refit = loaded(Integers, 0)
    for name in ("ids", "own"):
        update(refit, {name: torch.tensor([0, 1, 2, 100, 127]).to(dtype)})
        assert held(refit)[name].tolist() == [0, 1, 2, 100, 127]
    update(refit, {"id": torch.tensor([99.0])})
    assert refit.model.id.item() == 99


NO_IDS = [
    torch.tensor([0, 1, 2, 3, 2**31]),
    torch.tensor([0, 1, 2, 3, -(2**31) - 1]),
    torch.tensor([0, 1, 0.5, 3, 4]),
    torch.tensor([0, 1, NAN, 3, 4]),
    torch.tensor([0, 1, INF, 3, 4]),
    torch.tensor([0, 1, 2.0**31, 3, 4]),
    torch.tensor([0, 1, 2**53 + 0.5, 3, 4], dtype=torch.float64),
    torch.tensor([0, 1, 2, 3, 4], dtype=torch.bfloat16),
    torch.tensor([0, 1, 2, 3, 4], dtype=torch.float16),
    torch.tensor([0, 1, 2, 3, 4], dtype=torch.float32).to(torch.float8_e4m3fn),
    torch.tensor([False, True, True, True, True]),
]


@pytest.mark.parametrize("wrong", NO_IDS)
@pytest.mark.parametrize("name", ["ids", "own"])
def test_what_an_integer_can_t_hold_is_refused_by_name_at_the_start_and_later(name, wrong):
    refit = loaded(Integers, 0)
    for _ in range(2):
        with pytest.raises(RefitError, match=rf"{name}: .*(int32|paired)"):
            update(refit, {name: wrong})
        check_same(refit, loaded(Integers, 0))
    fresh = ModelRefit(Integers(), Options(), {}, list)
    fresh.attach()
    with pytest.raises(RefitError, match=rf"{name}: .*(int32|paired)"):
        fresh.model.load_weights(iter((weights(fresh.model, 0) | {name: wrong}).items()))
    assert not held(fresh)[name].any()


@pytest.mark.parametrize("value", [2.0**15, 0.5, NAN])
def test_one_integer_that_is_loaded_by_its_value_is_refused_too(value):
    refit = loaded(Integers, 0)
    with pytest.raises(RefitError, match=r"id: .*int16"):
        update(refit, {"id": torch.tensor([value])})
    check_same(refit, loaded(Integers, 0))


@pytest.mark.parametrize(
    ("sent", "served", "is_named"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, True),
        (torch.bfloat16, torch.float16, True),
        (torch.float16, torch.bfloat16, False),
        (torch.float32, torch.bfloat16, False),
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.bfloat16, False),
    ],
)
@pytest.mark.parametrize("kind", [Toy, Slices, Computed])
def test_what_comes_with_fewer_bits_than_it_is_served_with_is_named(kind, sent, served, is_named):
    refit = loaded(kind, 0)
    refit.model.b.weight.data = refit.model.b.weight.data.to(served)
    for seed in (1, 2, 3):  # natively, and replayed
        tensors = weights(refit.model, seed)
        update(refit, tensors | {"b.weight": tensors["b.weight"].to(sent)})
        assert refit.report.refit.narrowed == (["b.weight"] if is_named else [])
        stored = tensors["b.weight"].to(sent).to(served)
        assert torch.equal(refit.model.b.weight, stored)
        refit.report.give_up("the test goes on")
    assert last_refit(refit.report)["narrowed"] == (["b.weight"] if is_named else [])


def test_the_list_of_what_came_with_fewer_bits_is_short():
    class Many(Toy):
        names = tuple(f"part{at}" for at in range(100))

        def __init__(self) -> None:
            super().__init__()
            for name in self.names:
                setattr(self, name, nn.Parameter(torch.zeros(2), requires_grad=False))

    refit = loaded(Many, 0)
    for seed in (1, 2):
        with refit.during(Update(Origin.TENSOR)):
            tensors = weights(refit.model, seed)
            refit.model.load_weights([(name, one.bfloat16()) for name, one in tensors.items()])
            assert len(refit.report.refit.narrowed) == 100
            assert last_refit(refit.report)["narrowed"] == list(Many.names[:16])
            refit.report.give_up("the test goes on")


def test_a_name_that_reaches_nothing_is_refused():
    refit = loaded(Toy, 0)
    refit.model.load = lambda name, tensor: None
    with pytest.raises(RefitError, match="no parameter takes"):
        update(refit, weights(refit.model, 1))
