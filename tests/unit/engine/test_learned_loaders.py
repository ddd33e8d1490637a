"""A loader of SGLang's layers that copied is not run again; one of which anything else was seen is.

What it would do is done at once, or together with all of its bucket. The judge is the same model without this
package, through the same updates.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.model import parameters
from sglang_fp8rl.engine.model.parameters import Target
from sglang_fp8rl.engine.native import deferred, learned
from sglang_fp8rl.engine.refit import ModelRefit
from sglang_fp8rl.errors import RefitError
from tools.census.toys.toy import Named, attached, loaded, weights


class Fused(nn.Module):
    """A layer of two parts and one beside it, loaded by a loader that is told the part and counts its runs."""

    names = ("first", "second", "beside")

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(12, 4), requires_grad=False)
        self.beside = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.both.weight_loader = self.load_part
        self.beside.weight_loader = self.load_beside
        self.runs = 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self.names, (6, 4))

    def load_weights(self, pairs: Named) -> None:
        for name, tensor in pairs:
            if name == "beside":
                self.beside.weight_loader(self.beside, tensor)
            else:
                self.both.weight_loader(self.both, tensor, self.names.index(name))

    def load_beside(self, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded)

    def load_part(self, parameter: torch.Tensor, loaded: torch.Tensor, part: int) -> None:
        self.runs += 1
        assert loaded.shape == (6, 4)
        parameter.data.narrow(0, 6 * part, 6).copy_(loaded)


class Turned(Fused):
    """A view of a part of it, and a fill."""

    def load_part(self, parameter, loaded, part):
        self.runs += 1
        half = loaded.narrow(1, 2 * part, 2)
        parameter.data[6 * part : 6 * part + 6, :2].copy_(half)
        parameter.data[6 * part : 6 * part + 6, 2:].fill_(part)


class WritesWhatCameFirst(Fused):
    """Half of each part is of the first tensor of the call, which lies in the same storage."""

    def load_weights(self, pairs: Named) -> None:
        pairs = list(pairs)
        self.came_first = pairs[0][1]
        super().load_weights(pairs)

    def load_part(self, parameter, loaded, part):
        self.runs += 1
        parameter.data[6 * part : 6 * part + 3].copy_(self.came_first[:3])
        parameter.data[6 * part + 3 : 6 * part + 6].copy_(loaded[3:])


class Keeps(Fused):
    """Half of each is written at once, the rest with the next one's."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, torch.Tensor] = {}

    def load_part(self, parameter, loaded, part):
        self.runs += 1
        parameter.data[6 * part : 6 * part + 3].copy_(loaded[:3])
        self.kept[part] = loaded[3:]
        if len(self.kept) == 2:
            for at, one in self.kept.items():
                parameter.data[6 * at + 3 : 6 * at + 6].copy_(one)
            self.kept.clear()


class AsksForAValue(Fused):
    def load_part(self, parameter, loaded, part):
        self.runs += 1
        rows = parameter.data.narrow(0, 6 * part, 6)
        rows.copy_(loaded if float(loaded[0, 0]) > 0 else loaded.flip(0))


class Computes(Fused):
    def load_part(self, parameter, loaded, part):
        self.runs += 1
        parameter.data.narrow(0, 6 * part, 6).copy_(loaded * 2)


class WritesAnother(Fused):
    def load_part(self, parameter, loaded, part):
        super().load_part(parameter, loaded, part)
        self.beside.data.copy_(loaded)


class CallsAnother(Fused):
    def load_part(self, parameter, loaded, part):
        super().load_part(parameter, loaded, part)
        self.beside.weight_loader(self.beside, loaded)


class NamesItsParts(Fused):
    """Two numbers that mean nothing without their names."""

    def load_weights(self, pairs):
        for name, tensor in pairs:
            if name == "beside":
                self.beside.weight_loader(self.beside, tensor)
            else:
                self.both.weight_loader(self.both, tensor, **{name: 0})

    def load_part(self, parameter, loaded, first=None, second=None):
        super().load_part(parameter, loaded, 0 if second is None else 1)


class TellsTrueFromOne(Fused):
    def load_weights(self, pairs):
        for name, tensor in pairs:
            if name == "beside":
                self.beside.weight_loader(self.beside, tensor)
            else:
                self.both.weight_loader(self.both, tensor, True if name == "first" else 1)

    def load_part(self, parameter, loaded, part):
        super().load_part(parameter, loaded, 0 if part is True else 1)


class TakesAList(Fused):
    def load_weights(self, pairs):
        for name, tensor in pairs:
            part = [] if name == "beside" else [self.names.index(name)]
            parameter = self.both if part else self.beside
            parameter.weight_loader(parameter, tensor, part)

    def load_beside(self, parameter, loaded, part):
        parameter.data.copy_(loaded)

    def load_part(self, parameter, loaded, part):
        super().load_part(parameter, loaded, *part)


LEARNED = [Fused, Turned, NamesItsParts]
RUN_EACH_TIME = [AsksForAValue, Computes, WritesAnother, CallsAnother, TakesAList]


@pytest.fixture(params=[1, sys.maxsize], ids=["together", "at once"])
def known(request, monkeypatch):
    """These loaders count as those of SGLang's layers."""
    monkeypatch.setattr(learned, "_LAYERS", (__name__,))
    monkeypatch.setattr(deferred, "FEWEST", request.param)


def served(kind: type[Fused], *updates: int) -> ModelRefit:
    """Started on its first weights, and updated by these seeds."""
    refit = loaded(kind, 0, replay=False)
    for seed in updates:
        send(refit, list(weights(refit.model, seed).items()))
    return refit


def send(refit: ModelRefit, pairs: list[tuple[str, torch.Tensor]]) -> None:
    with refit.during(Update(Origin.TENSOR)):
        refit.model.load_weights([(name, one.clone()) for name, one in pairs])


# Of a model's own loaders nothing is learnt: one may keep what it is given.
def test_a_loader_of_a_model_may_keep_what_it_is_given():
    holds_what_the_model_alone_holds(Keeps)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("kind", [*LEARNED, *RUN_EACH_TIME, TellsTrueFromOne])
def test_updates_leave_what_the_model_alone_leaves(kind):
    holds_what_the_model_alone_holds(kind)


def holds_what_the_model_alone_holds(kind: type[Fused]) -> None:
    refit, alone = served(kind), kind()
    alone.load_weights(iter(weights(alone, 0).items()))
    for seed in range(1, 7):
        pairs = list(weights(alone, seed).items())
        send(refit, pairs)
        alone.load_weights(pairs)
        for name in ("both", "beside"):
            assert torch.equal(getattr(refit.model, name), getattr(alone, name)), (seed, name)


@pytest.mark.usefixtures("known")
def test_another_tensor_in_the_same_storage_is_not_taken_for_a_part_of_what_came():
    refit, alone = attached(WritesWhatCameFirst(), replay=False), WritesWhatCameFirst()
    refit.model.load_weights(iter(sorted(weights(alone, 0).items())))
    for seed in range(1, 5):
        named = sorted(weights(alone, seed).items())
        if seed == 4:
            named[1:] = reversed(named[1:])
        storage = torch.cat([one.flatten() for _, one in named]).split(24)
        pairs = [(name, one.view(6, 4)) for (name, _), one in zip(named, storage, strict=True)]
        with refit.during(Update(Origin.TENSOR)):
            refit.model.load_weights(iter(pairs))  # those of a list get storages of their own
        alone.load_weights(pairs)
        assert torch.equal(refit.model.both, alone.both), seed


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("kind", LEARNED)
def test_a_loader_that_copied_is_not_run_again(kind):
    refit, random = served(kind), Random(0)
    runs = []
    for seed in range(1, 6):
        before, pairs = refit.model.runs, list(weights(refit.model, seed).items())
        random.shuffle(pairs)  # in any order, and in other buckets each time
        cut = random.randrange(1, 3)
        send(refit, pairs[:cut])
        send(refit, pairs[cut:])
        runs.append(refit.model.runs - before)
    assert runs == [2, 0, 0, 0, 0]


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("kind", RUN_EACH_TIME)
def test_a_loader_of_which_more_was_seen_is_run_each_time(kind):
    refit = served(kind)
    for seed in range(1, 6):
        before = refit.model.runs
        send(refit, list(weights(refit.model, seed).items()))
        # One that computes is run once more, on the parameter.
        assert refit.model.runs - before >= 2, seed


@pytest.mark.usefixtures("known")
def test_a_loader_whose_experts_may_move_is_run_each_time(monkeypatch):
    monkeypatch.setattr(Target, "is_repeatable", False)
    refit = served(Fused)
    for seed in range(1, 6):
        before = refit.model.runs
        send(refit, list(weights(refit.model, seed).items()))
        assert refit.model.runs - before == 2


@pytest.mark.usefixtures("known")
def test_loaders_of_experts_in_high_precision_are_run_each_time(monkeypatch):
    monkeypatch.setattr(Target, "has_experts", True)
    monkeypatch.setattr(parameters, "experts_may_move", lambda: False)
    refit = served(Fused)
    for seed in (1, 2, 3):
        before = refit.model.runs
        send(refit, list(weights(refit.model, seed).items()))
        assert refit.model.runs - before == 2


@pytest.mark.usefixtures("known")
def test_a_tensor_of_another_shape_is_not_taken_for_what_was_learnt():
    refit = served(Fused, 1, 2, 3)
    before = refit.model.both.clone()
    with pytest.raises(RefitError, match="shape"):
        send(refit, [("first", torch.zeros(12, 4))])
    with pytest.raises(RefitError, match="first: NaN or Inf"):
        send(refit, [("first", torch.full((6, 4), float("nan")))])
    assert torch.equal(refit.model.both, before)


@pytest.mark.usefixtures("known")
def test_floats_are_alike_to_a_loader_and_nothing_else_is():
    refit = served(Fused, 1)
    runs = refit.model.runs
    for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16), 2):
        pairs = [(name, one.to(dtype)) for name, one in weights(refit.model, seed).items()]
        send(refit, pairs)
        assert torch.equal(refit.model.both[:6], dict(pairs)["first"].float())
    assert refit.model.runs == runs
    with pytest.raises(RefitError, match=r"torch\.int32 for both"):
        send(refit, [("first", torch.ones((6, 4), dtype=torch.int32))])


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("moved", [torch.clone, torch.Tensor.half], ids=["elsewhere", "half"])
@pytest.mark.parametrize("kind", LEARNED)
def test_what_is_learnt_goes_where_the_parameter_lies_by_then(kind, moved):
    refit, alone = served(kind, 1, 2, 3, 4), kind()
    both = refit.model.both
    old, before, both.data = both.data, both.data.clone(), moved(both.data)
    for seed in (5, 6, 7):
        pairs = weights(refit.model, seed)
        send(refit, list(pairs.items()))
        alone.load_weights(pairs.items())
        assert torch.equal(both, alone.both.to(both.dtype)), seed
    assert torch.equal(old, before)


@pytest.mark.usefixtures("known")
def test_what_is_learnt_is_refused_of_a_parameter_that_holds_something_else_by_then():
    refit = served(Fused, 1, 2, 3, 4)
    refit.model.both.data = refit.model.both.data.view(torch.int32)
    with pytest.raises(RefitError, match="whole numbers"):
        send(refit, list(weights(refit.model, 5).items()))


@pytest.mark.usefixtures("known")
def test_memory_that_a_parameter_left_is_let_go_of():
    refit = served(Fused, 1, 2, 3)
    storage = refit.model.both.data.untyped_storage()
    refit.model.both.data = refit.model.both.data.clone()
    send(refit, list(weights(refit.model, 4).items()))
    assert torch._C._storage_Use_Count(storage._cdata) == 1


@pytest.mark.usefixtures("known")
def test_what_is_sent_is_let_go_of():
    refit = served(Fused)
    for seed in (1, 2, 3, 4):
        pairs = list(weights(refit.model, seed).items())
        storages = [one.untyped_storage() for _, one in pairs]
        with refit.during(Update(Origin.TENSOR)):
            refit.model.load_weights(list(pairs))
        del pairs
        assert all(torch._C._storage_Use_Count(one._cdata) == 1 for one in storages), seed


def test_the_loaders_of_sglangs_layers_are_where_they_are_looked_for():
    from sglang.srt.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    linear = [
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    ]
    for kind in (*linear, FusedMoE, VocabParallelEmbedding):
        assert kind.weight_loader.__module__ in learned._LAYERS
    for kind in linear:
        assert kind.weight_loader_v2.__module__ in learned._LAYERS


# What loaders note of weights that no server with this quantization has: GGUF's, and FP8 among FP4 experts.
_OF_OTHERS = {
    *("data_container", "expert_data_map", "shard_id", "shard_id_map", "shard_weight_type"),
    *("weight_type", "_pending_fp8_shared_scales", "_pending_fp8_shared_weights"),
}
_CHANGES = {"add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}


@pytest.mark.parametrize("module", learned._LAYERS)
def test_the_loaders_of_sglangs_layers_keep_nothing(module):
    tree = ast.parse(Path(importlib.import_module(module).__file__ or "").read_text())
    loaders = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.FunctionDef)
        and ("weight_loader" in one.name or "_load_" in one.name)
    ]
    assert len(loaders) >= 1
    kept = {name for loader in loaders for name in attributes_that_change(loader)}
    assert kept <= _OF_OTHERS


def attributes_that_change(function: ast.FunctionDef) -> Iterator[str]:
    """Attributes of any object that a function sets, or in which it puts something; `global` and `nonlocal` names."""
    for node in ast.walk(function):
        written: list[ast.AST] = []
        match node:
            case ast.Assign(targets=written) | ast.Delete(targets=written):
                pass
            case ast.AugAssign(target=one) | ast.AnnAssign(target=one):
                written = [one]
            case ast.Call(func=ast.Attribute(value=one, attr=called)) if called in _CHANGES:
                written = [one]
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                yield from names
        for one in written:
            while isinstance(one, ast.Subscript):
                one = one.value
            if isinstance(one, ast.Attribute):
                yield one.attr


def test_what_a_loader_keeps_would_be_found():
    source = """
def weight_loader(self, parameter, loaded):
    global seen
    seen = loaded
    parameter.count += 1
    parameter.shards[0] = loaded
    self.parts.append(loaded)
    del self.rest
    self.kept: int = 1
    local = {}
    local["shape"] = parameter.data.narrow(0, 0, 1)
"""
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    found = set(attributes_that_change(function))
    assert found == {"seen", "count", "shards", "parts", "rest", "kept"}
