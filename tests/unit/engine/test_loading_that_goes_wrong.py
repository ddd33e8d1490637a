"""What is refused, caught or not finite on the way through a model's loading: told, and nothing is kept of it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from support.random_programs import _layer
from test_observed_loading import (
    Added,
    OfWhatWasSent,
    Rebound,
    Toy,
    Value,
    check_same,
    loaded,
    update,
    weights,
)
from torch import nn

from sglang_fp8rl.config import Options
from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.native.checks import not_finite_errors
from sglang_fp8rl.engine.refit import ModelRefit
from sglang_fp8rl.engine.report.refit_record import State
from sglang_fp8rl.errors import Fp8RlError, HostError, RefitError
from sglang_fp8rl.numerics import quantize_per_channel
from sglang_fp8rl.wire.refit_note import RefitNote

NAN = float("nan")


def refused(refit: ModelRefit, tensors: dict[str, torch.Tensor], match: str) -> None:
    """The same update is refused as often as it comes."""
    for _ in range(2):
        with pytest.raises(Fp8RlError, match=match):
            update(refit, tensors)
        assert refit.report.log.state is not State.WHOLE


# -- what is kept of a refused call ----------------------------------------------------------------


@pytest.fixture
def without_collector():
    gc.disable()
    yield
    gc.enable()


def with_constant() -> ModelRefit:
    """A model with a tensor that no update sends, of which no forward pass was run."""
    refit = loaded(Toy, 0)
    refit.model.constant = torch.ones(5)
    refit.runner = SimpleNamespace(forward_pass_id=0)
    refit.note_loaded()
    return refit


@pytest.mark.parametrize("wrong", ["a shape", "a NaN", "a standing refusal"])
def test_a_refused_bucket_is_let_go_of_at_once(without_collector, wrong):
    refit = with_constant()
    for _ in range(3):
        tensors = weights(refit.model, 1)
        if wrong == "a shape":
            tensors["a.weight"] = torch.ones(7, 4)
        elif wrong == "a NaN":
            tensors["a.weight"][0, 0] = NAN
        else:
            refit.model.constant[0], refit.runner.forward_pass_id = 9, 1
        sent = weakref.ref(tensors["b.weight"])
        with pytest.raises((RefitError, HostError)):
            update(refit, tensors)
        del tensors
        assert sent() is None


class Quantized(nn.Module):
    """A matrix in FP8, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = _layer(torch.zeros(6, 4), is_fp8=True)
        self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name in ("linear.weight", "bias"):
                parameter = self.get_parameter(name)
                parameter.weight_loader(parameter, tensor)


def quantized() -> ModelRefit:
    model = Quantized()
    refit = ModelRefit(model, Options(), {}, list)
    refit.attach()
    model.load_weights(iter([("linear.weight", torch.ones(6, 4)), ("bias", torch.ones(4))]))
    return refit


def uses(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def test_a_half_that_waits_for_its_scale_keeps_nothing_of_the_sender_s_memory():
    refit, (codes, scale) = quantized(), quantize_per_channel(torch.randn(6, 4))
    before, note = uses(codes), RefitNote("one", None, "all")
    with refit.during(Update(Origin.TENSOR, note=note, is_last_call=False)):
        refit.model.load_weights([("linear.weight", codes)])
    assert uses(codes) == before
    expected = codes.clone()
    codes.view(torch.uint8).zero_()  # the sender fills it again
    with refit.during(Update(Origin.TENSOR, note=note)):
        refit.model.load_weights([("linear.weight_scale", scale), ("bias", torch.ones(4))])
    served = refit.model.linear.weight
    assert torch.equal(served.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("scales_first", [True, False])
def test_a_scale_under_two_names_is_refused(scales_first):
    refit, (codes, scale) = quantized(), quantize_per_channel(torch.randn(6, 4))
    scales = [("linear.weight_scale", 3 * scale), ("linear.weight_scale_inv", scale)]
    sent = (
        [*scales, ("linear.weight", codes)] if scales_first else [("linear.weight", codes), *scales]
    )
    refused(refit, dict(sent) | {"bias": torch.ones(4)}, "linear.weight_scale_inv")


# -- what was made of memory that is another's by now ----------------------------------------------


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


def streamed(tensors: dict[str, torch.Tensor]):
    for name in list(tensors):
        yield name, tensors.pop(name)


def test_a_tensor_of_a_stream_is_not_taken_for_the_one_whose_memory_it_got():
    for _ in range(100):  # an allocator gives freed memory out again, mostly
        model = PaddedFromStream()
        refit = ModelRefit(model, Options(), {}, list)
        refit.attach()
        model.load_weights(streamed(weights(model, 0)))
        landed = {
            name: [one.target.name for one in known.landings]
            for name, known in refit.names.known.items()
        }
        assert landed == {"a.weight": ["a.weight"], "b.weight": ["b.weight"]}
        with refit.during(Update(Origin.DISK)):
            model.load_weights(streamed(weights(model, 1)))


# -- what a forward pass changed -------------------------------------------------------------------


@pytest.mark.parametrize("before", ["nothing", "an update", "a release"])
def test_what_the_first_pass_changes_is_refused_whatever_came_before_it(before):
    refit = with_constant()
    if before == "an update":
        update(refit, weights(refit.model, 1))
        refit.derived.end_of_update()
    elif before == "a release":
        refit.constants.keep()
        refit.model.constant.fill_(NAN)
        refit.constants.put_back()
    update(refit, weights(refit.model, 2))  # what no pass has changed is no reason
    refit.derived.end_of_update()
    refit.model.constant[0], refit.runner.forward_pass_id = 9, 1
    refused(refit, weights(refit.model, 3), "constant.*changed by a forward pass")


# -- what is not finite, or fails, where the write is no copy --------------------------------------


class FilledByItsValue(Toy):
    """An integer that a loader fills with what Python read."""

    names = (*Toy.names, "count")

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)
        self.count.weight_loader = lambda parameter, loaded: parameter.data.fill_(loaded.item())


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (Added, "gain", NAN),
        (Value, "kind", NAN),
        (OfWhatWasSent, "table", NAN),
        (Rebound, "b.weight", NAN),
        (FilledByItsValue, "count", 2.5),
    ],
)
def test_no_way_of_writing_takes_what_can_t_be_served(kind, name, value):
    refit = loaded(kind, 0)
    for seed in (1, 2):
        update(refit, weights(refit.model, seed))
    tensors = weights(refit.model, 3)
    tensors[name] = tensors[name].float()
    tensors[name].view(-1)[0] = value
    refused(refit, tensors, name if kind is not Value else "NaN or Inf")
    update(refit, weights(refit.model, 4))
    check_same(refit, loaded(kind, 4))


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
                self.ids.weight_loader(self.ids, tensor[at], at)


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_that_is_refused_is_told_though_the_next_one_is_stored(part):
    refit = loaded(InParts, 0)
    tensors = weights(refit.model, 1)
    tensors["ids"] = tensors["ids"].double()
    tensors["ids"][part, 0] = 0.5
    refused(refit, tensors, "ids: .*0.5")


class Adding(Toy):
    """It adds by itself, and forgets what that raises."""

    def load(self, name, tensor):
        if name != "b.weight":
            super().load(name, tensor)
            return
        with contextlib.suppress(RuntimeError):
            self.b.weight.data.zero_()
            self.b.weight.data.add_(tensor[:, :3] if tensor[0, 0] > 100 else tensor)


def test_an_operation_that_fails_in_the_model_s_memory_is_told_though_the_model_goes_on():
    refit = loaded(Adding, 0)
    update(refit, weights(refit.model, 1))
    tensors = weights(refit.model, 2)
    tensors["b.weight"][0, 0] = 101
    refused(refit, tensors, "failed to write it while loading")


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


def test_a_loader_that_raises_leaves_nothing_of_what_it_did():
    refit = loaded(Raising, 0)
    tensors = weights(refit.model, 1)
    tensors["b.weight"][0, 0] = 101
    before = refit.model.b.weight.clone()
    refused(refit, tensors, "too large")
    assert torch.equal(refit.model.b.weight, before)


def test_flags_of_several_devices_are_looked_at_together():
    flags = [("a", torch.tensor([False, True])), ("b", torch.tensor([False]))]
    assert list(not_finite_errors(flags)) == ["a"]
    elsewhere = torch.zeros(1, dtype=torch.bool, device="meta")
    with pytest.raises(NotImplementedError, match="meta"):  # of its own device: it has no values
        not_finite_errors([*flags, ("c", elsewhere)])


# -- a tied head that comes in a stream ------------------------------------------------------------


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


@pytest.mark.parametrize("origin", [Origin.TENSOR, Origin.DISK])
@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_head_is_held_against_the_embedding_in_a_stream_too(origin, head_first):
    for differs in (False, True, False, True):
        refit, embedding = tied(), torch.randn(6, 4)
        sent = [("embed.weight", embedding), ("lm_head.weight", embedding + differs)]
        sent = sent[::-1] if head_first else sent
        update = Update(origin)
        with refit.during(update):
            refit.model.load_weights(sent if origin is Origin.TENSOR else iter(sent))
            refit.report.log.end_request(refit.report.verdict(update), update)
        assert refit.report.log.state is (State.FAILED if differs else State.WHOLE)
