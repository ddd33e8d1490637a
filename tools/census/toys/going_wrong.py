"""Toys in whose loading something is refused, caught or not finite."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import SimpleNamespace

import torch
from torch import nn

from sglang_fp8rl.config import Options
from sglang_fp8rl.engine.refit import ModelRefit
from sglang_fp8rl.errors import RefitError
from tools.census.toys.toy import Named, Toy
from tools.random_loading.programs import served_layer


class Quantized(nn.Module):
    """A matrix in FP8, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = served_layer(torch.zeros(6, 4), is_fp8=True)
        self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name in ("linear.weight", "bias"):
                parameter = self.get_parameter(name)
                parameter.weight_loader(parameter, tensor)


class PaddedFromStream(Toy):
    """`b.weight` is padded in memory that the tensor before it may have had."""

    def shapes(self):
        return {"a.weight": (6, 4), "b.weight": (5, 4)}

    def load(self, name, tensor):
        if name == "b.weight":
            padded = torch.zeros(6, 4)
            padded[:5] = tensor
            tensor = padded
        super().load(name, tensor)


class FilledByItsValue(Toy):
    """An integer that a loader fills with what Python read."""

    names = (*Toy.names, "count")

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)
        self.count.weight_loader = lambda parameter, loaded: parameter.data.fill_(loaded.item())


class InParts(Toy):
    """A tensor whose parts are loaded one by one; what is raised is forgotten."""

    names = (*Toy.names, "ids")

    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Parameter(torch.zeros(2, 3, dtype=torch.int32), requires_grad=False)
        self.ids.weight_loader = lambda parameter, loaded, at: parameter.data[at].copy_(loaded)

    def load(self, name, tensor):
        if name != "ids":
            super().load(name, tensor)
            return
        for at in (0, 1):
            with contextlib.suppress(RefitError):
                self.ids.weight_loader(self.ids, self.part(tensor, at), at)

    def part(self, tensor, at):
        return tensor[at]


class ToTwoPlaces(InParts):
    """One tensor for both rows; the loader of the first one may raise."""

    raises: type[Exception] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.ids.weight_loader = self._load_row

    def shapes(self):
        return super().shapes() | {"ids": (3,)}

    def part(self, tensor, at):
        return tensor

    def _load_row(self, parameter, loaded, at):
        if at == 0 and self.raises is not None:
            raise self.raises("not this row")
        parameter.data[at].copy_(loaded)


class Adding(Toy):
    """It adds by itself, and forgets what that raises."""

    def load(self, name, tensor):
        if name != "b.weight":
            super().load(name, tensor)
            return
        with contextlib.suppress(RuntimeError):
            self.b.weight.data.zero_()
            self.b.weight.data.add_(tensor[:, :3] if tensor[0, 0] > 100 else tensor)


class Raising(Toy):
    """A loader that does more than copy, and raises behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight.weight_loader = self._load_b

    def _load_b(self, parameter, tensor):
        parameter.data.zero_()
        parameter.data.add_(tensor)
        if tensor[0, 0] > 100:
            raise ValueError("too large")


class RaisingInAPool(Raising):
    """The same in a thread of a pool, as models of DeepSeek's family load theirs."""

    def load_weights(self, weights: Named) -> None:
        with ThreadPoolExecutor() as pool:
            loads = [pool.submit(self.load, name, tensor) for name, tensor in weights]
            for one in as_completed(loads):
                one.result()


def give_a_constant(refit: ModelRefit) -> None:
    """A tensor that no update sends, of a model of which no forward pass was run."""
    refit.model.constant, refit.runner = torch.ones(5), SimpleNamespace(forward_pass_id=0)
    refit.note_loaded()


def tied() -> ModelRefit:
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    class Embedding(VocabParallelEmbedding):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.weight = nn.Parameter(torch.zeros(6, 4), requires_grad=False)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = Embedding()
            self.config = SimpleNamespace(
                tie_word_embeddings=True, vocab_size=6, hidden_size=4, num_hidden_layers=1
            )

        def load_weights(self, weights) -> None:
            for name, tensor in weights:
                if name != "lm_head.weight":
                    parameter = self.get_parameter(name)
                    parameter.weight_loader(parameter, tensor)

    refit = ModelRefit(Tied(), Options(), {}, list)
    refit.attach()
    refit.model.load_weights(iter([("embed.weight", torch.ones(6, 4))]))
    return refit
