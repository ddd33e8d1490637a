"""What is refused, caught or not finite on the way through a model's loading: told, and nothing is kept of it."""

from __future__ import annotations

import pytest
import torch

from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.law.law import law_of
from sglang_fp8rl.engine.law.record import Outcome, State
from sglang_fp8rl.engine.native.checks import not_finite_errors
from sglang_fp8rl.engine.refit import ModelRefit
from sglang_fp8rl.errors import Fp8RlError, RefitError
from sglang_fp8rl.numerics import quantize_per_channel
from sglang_fp8rl.wire.refit_note import RefitNote
from tools.census.toys.going_wrong import (
    Adding,
    FilledByItsValue,
    InParts,
    PaddedFromStream,
    Quantized,
    Raising,
    ToTwoPlaces,
    give_a_constant,
    tied,
)
from tools.census.toys.more_than_copies import Added, OfWhatWasSent, Rebound, Value
from tools.census.toys.toy import Toy, attached, check_same, loaded, update, weights

NAN = float("nan")


def refused(refit: ModelRefit, tensors: dict[str, torch.Tensor], match: str) -> None:
    """The same update is refused as often as it comes."""
    for _ in range(2):
        with pytest.raises(Fp8RlError, match=match):
            update(refit, tensors)
        assert law_of(refit).log.state is not State.WHOLE


# -- what is kept of the sender's memory -----------------------------------------------------------


def quantized() -> ModelRefit:
    refit = attached(Quantized())
    refit.model.load_weights(iter([("linear.weight", torch.ones(6, 4)), ("bias", torch.ones(4))]))
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


def streamed(tensors: dict[str, torch.Tensor]):
    for name in list(tensors):
        yield name, tensors.pop(name)


def test_a_tensor_of_a_stream_is_not_taken_for_the_one_whose_memory_it_got():
    for _ in range(100):  # an allocator gives freed memory out again, mostly
        model = PaddedFromStream()
        refit = attached(model)
        model.load_weights(streamed(weights(model, 0)))
        landed = {
            name: [one.target.name for one in known.landings]
            for name, known in refit.names.known.items()
        }
        assert landed == {"a.weight": ["a.weight"], "b.weight": ["b.weight"]}
        with refit.during(Update(Origin.DISK)):
            model.load_weights(streamed(weights(model, 1)))


# -- what a forward pass changed -------------------------------------------------------------------


def with_constant() -> ModelRefit:
    refit = loaded(Toy, 0)
    give_a_constant(refit)
    return refit


@pytest.mark.parametrize("before", ["nothing", "an update", "a release"])
def test_what_the_first_pass_changes_is_refused_whatever_came_before_it(before):
    refit = with_constant()
    if before == "an update":
        update(refit, weights(refit.model, 1))
        refit.derived.end_of_update()
    elif before == "a release":
        refit.derived.kept_copies.keep_constants()
        refit.model.constant.fill_(NAN)
        refit.derived.kept_copies.put_constants_back()
    update(refit, weights(refit.model, 2))  # what no pass has changed is no reason
    refit.derived.end_of_update()
    refit.model.constant[0], refit.runner.forward_pass_id = 9, 1
    refused(refit, weights(refit.model, 3), "constant.*changed by a forward pass")


# -- what is not finite, or fails, where the write is no copy --------------------------------------


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


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_that_is_refused_is_told_though_the_next_one_is_stored(part):
    refit = loaded(InParts, 0)
    tensors = weights(refit.model, 1)
    tensors["ids"] = tensors["ids"].double()
    tensors["ids"][part, 0] = 0.5
    refused(refit, tensors, "ids: .*0.5")


def test_an_operation_that_fails_in_the_model_s_memory_is_told_though_the_model_goes_on():
    refit = loaded(Adding, 0)
    update(refit, weights(refit.model, 1))
    tensors = weights(refit.model, 2)
    tensors["b.weight"][0, 0] = 101
    refused(refit, tensors, "failed to write it while loading")


def test_a_loader_that_raises_leaves_nothing_of_what_it_did():
    refit = loaded(Raising, 0)
    tensors = weights(refit.model, 1)
    tensors["b.weight"][0, 0] = 101
    before = refit.model.b.weight.clone()
    refused(refit, tensors, "too large")
    assert torch.equal(refit.model.b.weight, before)


def test_a_tensor_of_which_one_place_was_refused_is_not_stored_by_the_other():
    refit = loaded(ToTwoPlaces, 0)
    refit.model.raises = ValueError
    refused(refit, weights(refit.model, 1), "not this row")
    refit.model.raises = None
    update(refit, weights(refit.model, 1))
    check_same(refit, loaded(ToTwoPlaces, 1))


def test_flags_of_several_devices_are_looked_at_together():
    flags = [("a", torch.tensor([False, True])), ("b", torch.tensor([False]))]
    assert list(not_finite_errors(flags)) == ["a"]
    elsewhere = torch.zeros(1, dtype=torch.bool, device="meta")
    with pytest.raises(NotImplementedError, match="meta"):  # of its own device: it has no values
        not_finite_errors([*flags, ("c", elsewhere)])


# -- a tied head that comes in a stream ------------------------------------------------------------


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
            law_of(refit).log.end_request(law_of(refit).verdict(update), update)
        assert law_of(refit).log.state is (State.FAILED if differs else State.WHOLE)


class DerivesInVain(Toy):
    """Its derivation raises, behind what its loaders have stored, and again where the call is stopped."""

    is_bad = False

    def load_weights(self, sent):
        super().load_weights(sent)
        self.post_load_weights()

    def post_load_weights(self):
        if self.is_bad:
            raise ValueError("no room for it")
        self.derived = self.a.weight.data.clone()


@pytest.mark.parametrize("replays", [True, False])
def test_a_derivation_that_raises_fails_its_refit_and_the_next_one_is_good(replays):
    refit = loaded(DerivesInVain, 0, replay=replays)
    refit.note_loaded()
    update(refit, weights(refit.model, 1))
    refit.model.is_bad = True
    with pytest.raises(RefitError, match="ValueError: no room for it"):
        update(refit, weights(refit.model, 2))
    assert law_of(refit).log.running is None
    assert law_of(refit).log.last.outcome is Outcome.FAILED
    assert str(law_of(refit).log.failures).count("no room for it") == 1
    refit.model.is_bad = False
    update(refit, weights(refit.model, 3))
    assert torch.equal(refit.model.derived, weights(refit.model, 3)["a.weight"])
