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
from sglang_fp8rl.wire.plan import UNUSED

SHAPES = {
    **{f"{n}.blocks.weight": (BLOCKWISE, (256, 384)) for n in range(6)},
    **{f"{n}.ragged.weight": (BLOCKWISE, (130, 257)) for n in range(3)},
    **{f"{n}.rows.weight": (PER_CHANNEL, (96, 160)) for n in range(3)},
    **{f"{n}.norm.weight": (PLAIN, (33,)) for n in range(5)},
    "router.weight": (PLAIN, (7, 33)),
    "large.weight": (BLOCKWISE, (640, 640)),
    "experts.weight": (PLAIN, (3, 5, 7)),
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
        found[name] = weight.mT.contiguous().mT if n % 4 == 3 and len(shape) > 1 else weight
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


def test_all_groups_of_a_bucket_are_started_before_one_is_waited_for(monkeypatch):
    """A GPU has something to do meanwhile."""
    seen, group = [], bucket_numbers._Group
    for name in ("start", "finish"):
        step = getattr(group, name)
        monkeypatch.setattr(group, name, lambda one, given, step=step, name=name: (
            seen.append(name), step(one, given)
        ))  # fmt: skip
    sent = list(weights(0).items())
    assert counted(BucketNumbers(PLAN), sent) == expected(sent)
    groups = seen.count("start")
    assert groups > 1
    assert seen == ["start"] * groups + ["finish"] * groups


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_counts_made_in_inference_mode_serve_outside_of_it(device):
    counts = BucketNumbers(PLAN)
    first, second = (
        {name: one.to(device) for name, one in weights(seed).items()} for seed in (12, 13)
    )
    with torch.inference_mode():
        assert counted(counts, first.items()) == expected(first.items())
    assert counted(counts, second.items()) == expected(second.items())


def test_what_a_server_does_not_use_has_no_number():
    plan = make_plan({"a": (UNUSED, (2, 3)), "b": (PLAIN, (2, 3))})
    sent = [("a", torch.ones(2, 3)), ("b", torch.ones(2, 3))]
    assert counted(BucketNumbers(plan), sent) == fingerprint_of(sent[1:], plan).numbers


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


def test_without_kernels_each_tensor_is_counted_by_itself(monkeypatch):
    monkeypatch.setattr(
        bucket_numbers,
        "has_kernel",
        lambda device, block, columns: columns < 100,  # not those of casts
    )
    counts = BucketNumbers(PLAN)
    assert counted(counts, weights(14).items()) == expected(weights(14).items())
    [(groups, alone)] = counts._layouts.values()
    assert sum(len(group.rows) for group in groups) == 7
    assert len(alone) == len(SHAPES) - 7


def test_pairs_part_no_group(monkeypatch):
    monkeypatch.setattr(bucket_numbers, "ROOM", 1 << 30)
    counts, pairs = BucketNumbers(PLAN), list(quantize_for_refit(weights(15).items(), PLAN))
    assert counted(counts, pairs) == expected(weights(15).items())
    [(groups, _)] = counts._layouts.values()
    assert len(groups) == 1


def test_layouts_of_updates_that_are_cut_each_otherwise_are_not_all_kept():
    counts, sizes = BucketNumbers(PLAN), []
    for limit in range(100_000, 1_000_000, 20_000):
        assert counted(counts, weights(16).items(), limit) == expected(weights(16).items())
        sizes.append(sum(counts._sizes()))
    assert max(sizes) < (bucket_numbers._UPDATES + 2) * len(SHAPES)


def test_a_row_of_a_copy_that_is_not_finite_is_named():
    bad = weights(17)
    bad["router.weight"][4, 2] = torch.inf
    with pytest.raises(QuantizationError, match=r"router\.weight: NaN or Inf in row 4 of 7"):
        counted(BucketNumbers(PLAN), bad.items())


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
