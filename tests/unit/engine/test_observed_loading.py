"""Whatever a model's `load_weights` does: after an update it holds what a fresh load gives, replayed or not.

The models are toys beside the census (`tools/census/toys`), each with one habit of a model class of SGLang's. The
judge is a fresh one.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.replayed import replay_of
from torch import nn

from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.law.law import law_of
from sglang_fp8rl.engine.law.status import last_refit
from sglang_fp8rl.errors import RefitError
from tools.census.toys.copies import (
    REPLAYED,
    Buffer,
    Cut,
    FilledTail,
    NoneFirst,
    Scalar,
    Slices,
    Threads,
    Warning,
)
from tools.census.toys.more_than_copies import (
    NATIVE,
    Computed,
    Folded,
    Integers,
    Joined,
    Kept,
    Listed,
    Negated,
    OfWhatWasSent,
    Rebound,
    Swapped,
    SwappedViews,
    Turned,
    Value,
)
from tools.census.toys.toy import (
    Named,
    Toy,
    attached,
    check_same,
    held,
    loaded,
    unloaded,
    update,
    weights,
)


@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("kind", [*REPLAYED, *NATIVE])
def test_every_update_leaves_what_a_fresh_load_leaves(kind, replays):
    refit = loaded(kind, 0, replay=replays)
    places = {name: one.data_ptr() for name, one in held(refit).items()}
    for seed in (1, 2, 3, 0):
        update(refit, weights(refit.model, seed))
        check_same(refit, loaded(kind, seed))
        assert {name: one.data_ptr() for name, one in held(refit).items()} == places


@pytest.mark.parametrize("kind", REPLAYED)
def test_copies_are_replayed_whoever_makes_them(kind):
    refit = loaded(kind, 0)
    for seed in (1, 2):
        update(refit, weights(refit.model, seed))
    counts = replay_of(refit).counts
    assert (counts.calls, counts.native_tensors) == (1, 0), counts


@pytest.mark.parametrize("kind", NATIVE)
def test_what_is_more_than_copies_is_native_and_says_why(kind):
    refit = loaded(kind, 0)
    for seed in (1, 2):
        update(refit, weights(refit.model, seed))
    counts = replay_of(refit).counts
    assert (counts.calls, counts.native_tensors) == (0, 2 * len(refit.model.shapes())), counts
    assert counts.native_reasons


def test_what_is_kept_of_a_loaded_parameter_follows_it():
    refit = loaded(Kept, 0)
    for seed in (1, 2, 3):
        update(refit, weights(refit.model, seed))
        fresh = loaded(Kept, seed).model
        assert torch.equal(refit.model.doubled[0], fresh.doubled[0])
        assert refit.model.first == fresh.first
    assert any("reads b.weight" in why for why in replay_of(refit).counts.native_reasons)


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
    assert replay_of(refit).counts.calls == 2


def test_a_tensor_is_seen_to_be_kept_where_the_one_before_it_was():
    refit, staged = loaded(Listed, 0), weights(Toy(), 1)
    for seed in (1, 2, 3):
        for name, tensor in weights(refit.model, seed).items():
            staged[name].copy_(tensor)  # a sender's buffers, each time
        update(refit, staged)
    assert not replay_of(refit).counts.calls
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
    assert replay_of(refit).counts.calls == 1


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
            verdict = law_of(refit).verdict()
            law_of(refit).give_up("the test goes on")
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
    law_of(refit).start_call(Update(Origin.TENSOR), None)
    assert law_of(refit).lacking().any()
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
    (why,) = law_of(refit).verdict().failures
    assert "b.weight" in why
    assert "--load-format dummy" in why
    assert not refit.names.known


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
    fresh = attached(Integers())
    with pytest.raises(RefitError, match=rf"{name}: .*(int32|paired)"):
        fresh.model.load_weights(iter((weights(fresh.model, 0) | {name: wrong}).items()))
    assert not held(fresh)[name].any()


class OfAnyDtype(Slices):
    """A buffer that the model copies into by itself, and a parameter with a loader, of one dtype."""

    names = (*Toy.names, "own", "given")
    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.zeros(3, dtype=self.dtype))
        self.given = nn.Parameter(torch.zeros(3, dtype=self.dtype), requires_grad=False)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "own":
            self.own.copy_(tensor)
        else:
            super().load(name, tensor)


@pytest.mark.parametrize("name", ["own", "given"])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
)
def test_what_has_no_sign_takes_whole_numbers_that_it_can_hold(name, dtype, monkeypatch):
    monkeypatch.setattr(OfAnyDtype, "dtype", dtype)
    refit = started_on_zeros(OfAnyDtype)
    for good in (
        torch.tensor([0.0, 1, 1]),
        torch.tensor([1, 0, 1]),
        torch.tensor([1, 1, 0]).to(dtype),
    ):
        update(refit, {name: good})
        assert torch.equal(held(refit)[name], good.to(dtype))
    before = held(refit)[name].clone()
    for wrong in ([0.5, 0, 1], [-1.0, 0, 1], [2.0**64, 0, 1]):
        with pytest.raises(RefitError, match=f"{name}: .*with a value of"):
            update(refit, {name: torch.tensor(wrong)})
        assert torch.equal(held(refit)[name], before)


@pytest.mark.parametrize("name", ["own", "given"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_what_no_cast_is_made_of_is_refused_with_a_loader_or_without(name, dtype):
    refit = started_on_zeros(OfAnyDtype)
    with pytest.raises(RefitError, match=f"{name}: dtype"):
        update(refit, {name: torch.tensor([1, 0, 1]).to(dtype)})
    assert not held(refit)[name].any()


def started_on_zeros(kind):
    refit = attached(kind())
    refit.model.load_weights((name, held(refit)[name].clone()) for name in kind.names)
    return refit


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
        assert law_of(refit).current.narrowed == (["b.weight"] if is_named else [])
        stored = tensors["b.weight"].to(sent).to(served)
        assert torch.equal(refit.model.b.weight, stored)
        law_of(refit).give_up("the test goes on")
    assert last_refit(law_of(refit))["narrowed"] == (["b.weight"] if is_named else [])


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
            assert len(law_of(refit).current.narrowed) == 100
            assert last_refit(law_of(refit))["narrowed"] == list(Many.names[:16])
            law_of(refit).give_up("the test goes on")


def test_a_name_that_reaches_nothing_is_refused():
    refit = loaded(Toy, 0)
    refit.model.load = lambda name, tensor: None
    with pytest.raises(RefitError, match="no parameter takes"):
        update(refit, weights(refit.model, 1))


def test_a_lazily_negated_tensor_keeps_its_sign_where_the_bucket_is_replayed():
    refit, first, last = loaded(Toy, 0), weights(Toy(), 1), weights(Toy(), 2)
    for _ in range(2):
        update(refit, first)
    update(refit, {name: torch._neg_view(-one) for name, one in last.items()})
    assert replay_of(refit).counts.calls == 2
    check_same(refit, loaded(Toy, 2))
