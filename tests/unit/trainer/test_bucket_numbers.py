"""What goes by in a refit is counted as tensor by tensor, whatever came before, and as it was then."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from support.plans import BLOCKWISE, PER_CHANNEL, PLAIN, make_plan

from sglang_fp8rl.errors import QuantizationError
from sglang_fp8rl.numerics.fingerprint import NumberTable
from sglang_fp8rl.trainer import bucket_numbers, fingerprint_of, quantize_for_refit
from sglang_fp8rl.trainer.bucket_numbers import BucketNumbers
from sglang_fp8rl.trainer.fingerprint import Fingerprinter
from sglang_fp8rl.wire.bucket import buckets_of

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
    monkeypatch.setattr(bucket_numbers, "ROOM", 250_000)


def weights(seed):
    """Some with other strides; of all dtypes."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for n, (name, (_, shape)) in enumerate(SHAPES.items()):
        weight = torch.randn(shape, generator=generator).to(DTYPES[n % len(DTYPES)])
        found[name] = weight.t().contiguous().t() if n % 4 == 3 else weight
    return found


def counted(counts, sent, limit=1 << 30):
    numbers = Fingerprinter(counts.plan)
    for bucket, _ in buckets_of(sent, limit):
        counts.add(numbers, bucket)
    return numbers.fingerprint("").numbers


def expected(sent):
    return fingerprint_of(sent, PLAN).numbers


def test_any_order_and_any_part_is_counted_as_tensor_by_tensor():
    counts, draw = BucketNumbers(PLAN), random.Random(0)
    for seed in range(30):
        sent = list(weights(seed).items())
        if seed % 3:
            draw.shuffle(sent)
        if seed % 5 == 4:
            sent = sent[: draw.randrange(1, len(sent))]
        assert counted(counts, sent, draw.choice([1, 300_000, 1 << 30])) == expected(sent), seed


def test_pairs_and_other_dtypes_of_the_same_names_are_counted_too():
    counts, plain = BucketNumbers(PLAN), weights(1)
    for sent in (plain, {n: one.float() for n, one in plain.items()}, plain):
        pairs = list(quantize_for_refit(sent.items(), PLAN))
        assert counted(counts, sent.items()) == expected(sent.items()) == counted(counts, pairs)


def test_memory_that_an_iterator_takes_again_is_counted_as_it_was():
    def reused():
        for name, weight in weights(3).items():
            kept = weight.clone()
            yield name, kept
            kept.zero_()

    counts = BucketNumbers(PLAN)
    for _ in range(2):
        assert counted(counts, reused()) == expected(weights(3).items())


def test_what_a_failed_refit_began_is_forgotten():
    counts = BucketNumbers(PLAN)
    for at in range(1, 6):
        begun, numbers = buckets_of(weights(4).items(), 300_000), Fingerprinter(PLAN)
        for _, (bucket, _) in zip(range(at), begun, strict=False):
            counts.add(numbers, bucket)
        assert counted(counts, weights(5).items(), 300_000) == expected(weights(5).items()), at


def test_a_part_of_a_group_costs_its_own_bytes(monkeypatch):
    """And not those of all that has room with it."""
    counts, counted_bytes = BucketNumbers(PLAN), []
    counted(counts, weights(10).items())

    def table(boxes):
        counted_bytes.append(sum(box.tensor.nbytes for one in boxes for box in one))
        return NumberTable(boxes)

    monkeypatch.setattr(bucket_numbers, "NumberTable", table)
    sent = [("3.norm.weight", weights(11)["3.norm.weight"])]
    assert counted(counts, sent) == expected(sent)
    assert counted_bytes == [2 * 33]


def test_counts_made_in_inference_mode_serve_outside_of_it():
    counts = BucketNumbers(PLAN)
    with torch.inference_mode():
        assert counted(counts, weights(12).items()) == expected(weights(12).items())
    assert counted(counts, weights(13).items()) == expected(weights(13).items())


@pytest.mark.parametrize("name", ["1.blocks.weight", "2.rows.weight", "large.weight"])
def test_what_is_not_finite_is_named_and_the_next_refit_is_right(name):
    counts, bad = BucketNumbers(PLAN), weights(6)
    for _ in range(2):
        bad[name][3, 5] = torch.nan
        with pytest.raises(QuantizationError, match=f"{name}: NaN or Inf in block"):
            counted(counts, bad.items())
        assert counted(counts, weights(6).items()) == expected(weights(6).items())


def test_the_second_refit_makes_no_table(monkeypatch):
    counts, names = BucketNumbers(PLAN), [name for name in SHAPES if name != "large.weight"]
    counted(counts, [(name, weights(7)[name]) for name in names])

    def refuse(*args):
        raise AssertionError(args)

    monkeypatch.setattr(BucketNumbers, "_laid_out", refuse)
    monkeypatch.setattr(bucket_numbers, "NumberTable", refuse)
    sent = [(name, weights(8)[name]) for name in names]
    assert counted(counts, sent) == expected(sent)


def test_what_was_sent_is_not_kept():
    counts, memory = BucketNumbers(PLAN), []
    for bucket, _ in buckets_of(weights(9).items(), 300_000):
        counts.add(Fingerprinter(PLAN), bucket)
        memory.append(weakref.ref(bucket.flat.untyped_storage()))
    del bucket
    assert not any(one() is not None for one in memory)


@pytest.mark.gpu
def test_an_iterator_may_work_on_a_stream_of_its_own():
    """It is the consumer's too while it is suspended, and not behind its end."""
    side, counts = torch.cuda.Stream(), BucketNumbers(PLAN)

    def sent(seed):
        with torch.cuda.stream(side):
            for name, weight in weights(seed).items():
                torch.cuda._sleep(2_000_000)
                yield name, weight.cuda()

    for seed in range(3):
        assert counted(counts, sent(seed)) == expected(weights(seed).items())
