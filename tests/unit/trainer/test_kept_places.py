"""What goes by in a refit is counted as tensor by tensor, whatever came before, and as it was then."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from support.plans import BLOCKWISE, PER_CHANNEL, PLAIN, make_plan

from sglang_fp8rl.errors import QuantizationError
from sglang_fp8rl.numerics.fingerprint import NumberTable
from sglang_fp8rl.trainer import fingerprint_of, kept_places, quantize_for_refit
from sglang_fp8rl.trainer.fingerprint import Fingerprinter
from sglang_fp8rl.trainer.kept_places import KeptPlaces

SHAPES = {
    **{f"{n}.blocks.weight": (BLOCKWISE, (256, 384)) for n in range(6)},
    **{f"{n}.ragged.weight": (BLOCKWISE, (130, 257)) for n in range(3)},
    **{f"{n}.rows.weight": (PER_CHANNEL, (96, 160)) for n in range(3)},
    **{f"{n}.norm.weight": (PLAIN, (33,)) for n in range(5)},
    "router.weight": (PLAIN, (7, 33)),
    "large.weight": (BLOCKWISE, (640, 640)),
}
PLAN = make_plan(SHAPES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    """For two or three of the matrices, and not for the large one."""
    monkeypatch.setattr(kept_places, "ROOM", 250_000)


def weights(seed):
    """Some with other strides; of all dtypes."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for n, (name, (_, shape)) in enumerate(SHAPES.items()):
        weight = torch.randn(shape, generator=generator).to(DTYPES[n % len(DTYPES)])
        found[name] = weight.t().contiguous().t() if n % 4 == 3 else weight
    return found


def counted(places, sent):
    numbers = Fingerprinter(places.plan)
    for _ in places.watch(sent, numbers):
        pass
    return numbers.fingerprint("").numbers


def expected(sent):
    return fingerprint_of(sent, PLAN).numbers


def test_any_order_and_any_part_is_counted_as_tensor_by_tensor():
    places, draw = KeptPlaces(PLAN), random.Random(0)
    for seed in range(30):
        sent = list(weights(seed).items())
        if seed % 3:
            draw.shuffle(sent)
        if seed % 5 == 4:
            sent = sent[: draw.randrange(1, len(sent))]
        assert counted(places, sent) == expected(sent), seed


def test_pairs_and_other_dtypes_of_the_same_names_are_counted_too():
    places, plain = KeptPlaces(PLAN), weights(1)
    for sent in (plain, {n: one.float() for n, one in plain.items()}, plain):
        pairs = list(quantize_for_refit(sent.items(), PLAN))
        assert counted(places, sent.items()) == expected(sent.items()) == counted(places, pairs)


def test_a_name_twice_is_two_numbers():
    sent = [(name, weights(seed)[name]) for name in SHAPES for seed in (1, 2)]
    assert counted(KeptPlaces(PLAN), sent) == expected(sent)


def test_memory_that_an_iterator_takes_again_is_counted_as_it_was():
    def reused():
        for name, weight in weights(3).items():
            kept = weight.clone()
            yield name, kept
            kept.zero_()

    places = KeptPlaces(PLAN)
    for _ in range(2):
        assert counted(places, reused()) == expected(weights(3).items())


def test_what_a_failed_refit_began_is_forgotten():
    places = KeptPlaces(PLAN)
    for at in range(1, len(SHAPES)):
        begun = places.watch(weights(4).items(), Fingerprinter(PLAN))
        for _ in range(at):
            next(begun)
        begun.close()
        assert counted(places, weights(5).items()) == expected(weights(5).items()), at


def test_a_part_of_a_group_costs_its_own_bytes(monkeypatch):
    """And not those of all that has room with it."""
    places, counted_bytes = KeptPlaces(PLAN), []
    counted(places, weights(10).items())

    def table(boxes):
        counted_bytes.append(sum(box.tensor.nbytes for one in boxes for box in one))
        return NumberTable(boxes)

    monkeypatch.setattr(kept_places, "NumberTable", table)
    sent = [("3.norm.weight", weights(11)["3.norm.weight"])]
    assert counted(places, sent) == expected(sent)
    assert counted_bytes == [2 * 33]


def test_places_made_in_inference_mode_serve_outside_of_it():
    places = KeptPlaces(PLAN)
    with torch.inference_mode():
        assert counted(places, weights(12).items()) == expected(weights(12).items())
    assert counted(places, weights(13).items()) == expected(weights(13).items())


@pytest.mark.parametrize("name", ["1.blocks.weight", "2.rows.weight", "large.weight"])
def test_what_is_not_finite_is_named_and_the_next_refit_is_right(name):
    places, bad = KeptPlaces(PLAN), weights(6)
    for _ in range(2):
        bad[name][3, 5] = torch.nan
        with pytest.raises(QuantizationError, match=f"{name}: NaN or Inf in block"):
            counted(places, bad.items())
        assert counted(places, weights(6).items()) == expected(weights(6).items())


def test_the_second_refit_makes_no_place_and_no_table(monkeypatch):
    places = KeptPlaces(PLAN)
    counted(places, weights(7).items())
    left_alone = {"large.weight"}

    def refuse(*args):
        raise AssertionError(args)

    monkeypatch.setattr(KeptPlaces, "_place_of", refuse)
    monkeypatch.setattr(kept_places, "NumberTable", refuse)
    sent = {name: one for name, one in weights(8).items() if name not in left_alone}
    assert counted(places, sent.items()) == expected(sent.items())


def test_places_do_not_keep_what_was_sent():
    arrays = {name: one.float().numpy() for name, one in weights(9).items()}
    kept, places = [weakref.ref(one) for one in arrays.values()], KeptPlaces(PLAN)
    sent = {name: torch.from_numpy(one) for name, one in arrays.items()}
    counted(places, sent.items())
    del arrays, sent
    assert not any(one() is not None for one in kept)


@pytest.mark.gpu
def test_an_iterator_may_work_on_a_stream_of_its_own():
    """It is the consumer's too while it is suspended, and not behind its end."""
    side, places = torch.cuda.Stream(), KeptPlaces(PLAN)

    def sent(seed):
        with torch.cuda.stream(side):
            for name, weight in weights(seed).items():
                torch.cuda._sleep(2_000_000)
                yield name, weight.cuda()

    for seed in range(3):
        assert counted(places, sent(seed)) == expected(weights(seed).items())
