"""The number of a tensor: the same however it is cut, on every path, and another after any flip."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.numerics.numerics_cases import random_bytes
from support.plans import BLOCKWISE, PER_CHANNEL, PLAIN, make_plan

from sglang_fp8rl.errors import QuantizationError, RefitError
from sglang_fp8rl.numerics import quantize_blockwise
from sglang_fp8rl.numerics.fingerprint import (
    COLUMN_SEED,
    MASK,
    Box,
    NumberTable,
    _column_keys,
    by_torch,
    keys,
    scaled_boxes,
    seed_of,
    tensor_number,
    whole,
)
from sglang_fp8rl.trainer import LocalShard, added_up, fingerprint_of, quantize_for_refit
from sglang_fp8rl.wire.fingerprint import Fingerprint, Number, compare

SEED = seed_of("model.layers.0.mlp.down_proj.weight")
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn)


def box_number(*box):
    return NumberTable([[Box(*box)]]).numbers()[0]


def by_definition(tensor, seed):
    """The formula of the docstring in Python's integers."""
    rows = (
        tensor.clone(memory_format=torch.contiguous_format)
        .view(torch.uint8)
        .reshape(tensor.shape[0], -1)
        .tolist()
    )
    down = keys(seed, 0, len(rows)).tolist()
    across = keys(COLUMN_SEED, 0, len(rows[0]) // 2 + 1).tolist()
    return MASK & sum(
        down[r] * across[b // 2] * (value << 8 * (b % 2))
        for r, row in enumerate(rows)
        for b, value in enumerate(row)
    )


def test_a_lazily_negated_tensor_has_the_number_of_its_values():
    for negated in (torch.randn(5, 6), torch.randn(1, 7), torch.randn(3, 4, 5)):
        expected = tensor_number(-negated, SEED)
        assert tensor_number(torch._neg_view(negated), SEED) == expected


def test_bytes_at_an_odd_place_of_their_storage_have_the_number_of_their_values():
    memory = torch.zeros(1000, dtype=torch.uint8).numpy()
    for first in (0, 1):
        codes = torch.frombuffer(memory, dtype=torch.uint8, offset=first)[1:901].view(9, 100)
        codes.copy_(torch.arange(900).view(9, 100) % 251)
        assert tensor_number(codes, SEED) == by_definition(codes, SEED)


def test_threads_do_not_change_the_number(monkeypatch):
    cpu = pytest.importorskip("sglang_fp8rl.numerics.cpu.fingerprint")
    monkeypatch.setattr("sglang_fp8rl.numerics.cpu.jit.WORTH_A_THREAD", 500)
    tensor, columns = random_bytes((37, 101), torch.bfloat16), _column_keys(1024)
    expected = by_definition(tensor, SEED)
    for threads in (1, 2, 5, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # noqa: B023
        assert cpu.matrix_number(tensor, 0, 0, SEED, columns) & MASK == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [101, 102], ids=["odd rows", "even rows cut short"])
def test_kernel_torch_and_definition_agree(dtype, width):
    tensor = random_bytes((37, width), dtype)[:, :101]
    expected = by_definition(tensor, SEED)
    assert tensor_number(tensor, SEED) == expected
    assert by_torch(tensor, 0, 0, SEED, _column_keys(1024)) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [0, 1, 2])
def test_without_numba_words_and_bytes_give_the_same_number(monkeypatch, dtype, first):
    tensor = random_bytes((37, 102), dtype)[:, first:]
    expected = box_number(tensor, (37, 102), (0, first), SEED)
    monkeypatch.setattr("sglang_fp8rl.numerics.fingerprint.kernels", lambda what, device: None)
    assert box_number(tensor, (37, 102), (0, first), SEED) == expected


@pytest.mark.parametrize("shape", [(5, 1), (1, 1), (1, 5)])
def test_a_side_of_one_element_may_have_any_step(shape):
    whole = random_bytes((64, 64), torch.int32)
    for step in (1, 512):
        column = whole.as_strided(shape, (8, step) if shape[1] == 1 else (step, 1))
        assert tensor_number(column, SEED) == by_definition(column, SEED)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_number_of_a_cpu(dtype):
    tensor = random_bytes((370, 1010), dtype)[:, 1:]
    assert tensor_number(tensor.cuda(), SEED) == tensor_number(tensor, SEED)


def test_keys_are_odd_and_those_of_splitmix64():
    # The first outputs of the reference implementation for seed 1234567, made odd.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    found = keys(1234567, 0, 3)
    assert found.tolist() == [value | 1 for value in expected]
    assert np.array_equal(keys(7, 5, 10), keys(7, 0, 15)[5:])


@st.composite
def cut_boxes(draw):
    """A shape, a dtype, and boxes that make it up: cut again and again at any row or column."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 300)))
    boxes = [((0, 0, 0), shape)]
    for _ in range(draw(st.integers(0, 5))):
        start, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, 2))
        at = draw(st.integers(0, size[dim]))
        first = tuple(at if d == dim else n for d, n in enumerate(size))
        rest = tuple(n - at if d == dim else n for d, n in enumerate(size))
        moved = tuple(s + at if d == dim else s for d, s in enumerate(start))
        boxes += [(start, first), (moved, rest)]
    return shape, draw(st.sampled_from(DTYPES)), boxes


@settings(max_examples=150, deadline=None)
@given(cut_boxes())
def test_any_partition_into_boxes_sums_to_the_whole(case):
    shape, dtype, boxes = case
    whole = random_bytes(shape, dtype)
    total = sum(
        box_number(
            whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))],
            shape,
            start,
            SEED,
        )
        for start, size in boxes
    )
    assert total & MASK == tensor_number(whole, SEED)


def scaled_number(name, codes, scales, shape, start):
    return NumberTable([scaled_boxes(name, codes, [scales], shape, start, (128, 128))]).numbers()[0]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from(["rows", "columns"]), st.data())
def test_shards_on_block_boundaries_sum_to_the_whole_with_their_scales(down, across, way, data):
    shape = (128 * down - data.draw(st.integers(0, 127)), 128 * across)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(down))
    codes, scales = quantize_blockwise(weight)
    whole = scaled_number("w", codes, scales, shape, (0, 0))
    cut = data.draw(st.integers(0, down if way == "rows" else across))
    total = 0
    for first, last in ((0, cut), (cut, None)):
        elements = slice(128 * first, None if last is None else 128 * last)
        blocks = slice(first, last)
        if way == "rows":
            part, start = (codes[elements], scales[blocks]), (128 * first, 0)
        else:
            part, start = (codes[:, elements], scales[:, blocks]), (0, 128 * first)
        total += scaled_number("w", *part, shape, start)
    assert total & MASK == whole


@pytest.mark.parametrize("shape", [(), (1,), (4,)])
def test_codes_of_what_is_no_matrix_are_refused_by_name(shape):
    codes = torch.zeros(shape).to(torch.float8_e4m3fn)
    with pytest.raises(QuantizationError, match="a_scalar: shape"):
        scaled_boxes("a_scalar", codes, [torch.ones(1, 1)], shape, (0,) * len(shape), (2, 2))


def test_scales_of_other_blocks_than_those_of_the_box_are_refused():
    """A column that a loader stores as a row."""
    codes = torch.zeros(4, 1).to(torch.float8_e4m3fn)
    with pytest.raises(QuantizationError, match=r"a_column: .*\[2, 1\] blocks"):
        scaled_boxes("a_column", codes, [torch.ones(1, 2)], (4, 1), (0, 0), (2, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_changes_the_number(dtype):
    tensor = random_bytes((5, 33), dtype)
    whole = tensor_number(tensor, SEED)
    flat = tensor.view(torch.uint8).view(-1)
    seen = {whole}
    for bit in range(8 * flat.numel()):
        flat[bit // 8] ^= 1 << bit % 8
        seen.add(tensor_number(tensor, SEED))
        flat[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + 8 * flat.numel()
    assert tensor_number(tensor, SEED) == whole


def test_what_is_only_moved_is_another_number():
    tensor = random_bytes((64, 64), torch.bfloat16)
    whole = tensor_number(tensor, SEED)
    for other in (tensor.flip(0), tensor.flip(1), tensor.t(), tensor.roll(1, 0), -tensor):
        assert tensor_number(other, SEED) != whole
    assert tensor_number(tensor, seed_of("another.weight")) != whole


SHAPES = {
    "a.weight": (BLOCKWISE, (256, 384)),
    "b.weight": (PER_CHANNEL, (96, 160)),
    "c.weight": (PLAIN, (7, 33)),
    "norm.weight": (PLAIN, (33,)),
}
PLAN = make_plan(SHAPES)


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (_, shape) in SHAPES.items()}


def test_who_quantizes_does_not_matter():
    sent = quantize_for_refit(weights().items(), PLAN)
    assert fingerprint_of(sent, PLAN).numbers == fingerprint_of(weights().items(), PLAN).numbers


def test_shards_of_trainer_ranks_add_up():
    def shard(tensor, rank):
        rows = -(-tensor.shape[0] // 256) * 128 if tensor.shape[0] > 128 else tensor.shape[0] // 2
        part = tensor[:rows] if rank == 0 else tensor[rows:]
        return LocalShard(part, tuple(tensor.shape), (rank * rows, *(0,) * (tensor.dim() - 1)))

    ranks = [
        fingerprint_of([(name, shard(one, rank)) for name, one in weights().items()], PLAN)
        for rank in range(2)
    ]
    whole = fingerprint_of(weights().items(), PLAN)
    assert added_up(ranks, PLAN).numbers == whole.numbers
    assert compare(whole, ranks[0]).missing.keys() == SHAPES.keys()
    with pytest.raises(RefitError, match=r"nothing was compared; a\.weight: the trainer has 49152"):
        compare(whole, ranks[0], partial=True).check("verify")
    replicas = [whole, *ranks]
    assert added_up([whole, whole], PLAN).numbers == whole.numbers
    for parts in ([*ranks, *ranks], replicas):
        with pytest.raises(RefitError, match="each part of a tensor is counted once"):
            added_up(parts, PLAN)


def test_ranks_without_rows_of_a_tensor_add_nothing():
    plan = make_plan({"gate.weight": (PLAIN, (1, 40))})
    full = torch.ones(1, 40)
    ranks = [LocalShard(full, (1, 40), (0, 0)), LocalShard(full[:0], (1, 40), (1, 0))]
    parts = [fingerprint_of([("gate.weight", one)], plan) for one in ranks]
    expected = fingerprint_of([("gate.weight", full)], plan).numbers
    assert added_up(parts, plan).numbers == added_up(parts[::-1], plan).numbers == expected


def test_a_tensor_that_comes_twice_is_counted_as_no_other():
    named = [*weights().items(), *weights(1).items()]
    with pytest.raises(RefitError, match=r"a\.weight: 196608 values were counted of 98304"):
        fingerprint_of(named, PLAN)


def test_scales_of_rows_may_come_without_their_one_column():
    sent = dict(quantize_for_refit(weights().items(), PLAN))
    sent["b.weight_scale"] = sent["b.weight_scale"].flatten()
    assert (
        fingerprint_of(sent.items(), PLAN).numbers
        == fingerprint_of(weights().items(), PLAN).numbers
    )


def test_boxes_of_many_tensors_have_their_own_numbers():
    tensors = [random_bytes((3 + n, 40), torch.uint8, n) for n in range(5)]
    of = [[whole(one, n)] for n, one in enumerate(tensors)]
    found = NumberTable([*of, [], of[0] + of[1]]).numbers()
    assert found[:5] == [tensor_number(one, n) for n, one in enumerate(tensors)]
    assert found[5] == 0
    assert found[6] == (found[0] + found[1]) & MASK
    assert NumberTable([]).numbers() == []


def test_a_table_counts_what_lies_there_now_whatever_its_strides():
    tensors = [random_bytes((8, 40), dtype) for dtype in DTYPES]
    cut = [t for one in tensors for t in (one, one.t(), one[::2], one[:, 3], one[1:3, 5:6])]
    of = [[whole(one, n)] for n, one in enumerate(cut)]
    table = NumberTable(of)
    before = table.numbers()
    for one in tensors:
        one.view(torch.uint8).bitwise_not_()
    after = table.numbers()
    assert after == NumberTable(of).numbers()
    assert not set(before) & set(after)


def test_a_comparison_names_what_differs_what_is_missing_and_what_it_cannot_tell():
    served = fingerprint_of(weights().items(), PLAN)
    changed = weights()
    changed["a.weight"][200, 300] += 1
    del changed["norm.weight"]
    other = fingerprint_of(changed.items(), PLAN)
    found = compare(served, other)
    assert (list(found.differing), list(found.missing)) == (["a.weight"], ["norm.weight"])
    assert not found.ok
    with pytest.raises(RefitError, match=r"a\.weight.*norm\.weight"):
        found.check("verify")
    assert not compare(served, other, partial=True).missing
    foreign = Fingerprint("other", {**served.numbers, "a.weight": Number("bfloat16", 1)})
    assert list(compare(served, foreign).unproven) == ["a.weight"]
    assert compare(served, served).ok


def test_the_document_survives_the_wire():
    served = fingerprint_of(weights().items(), PLAN, source="x")
    again = Fingerprint.from_dict(served.as_dict(), "x")
    assert again == served
    with pytest.raises(RefitError, match="version"):
        Fingerprint.from_dict({**served.as_dict(), "version": 2}, "x")


def test_random_changes_never_collide():
    """2,000 seeded changes of a few elements each."""
    rng = random.Random(0)
    tensor = random_bytes((16, 128), torch.uint8)
    whole = tensor_number(tensor, SEED)
    for _ in range(2000):
        other = tensor.clone()
        for _ in range(rng.randint(1, 6)):
            other.view(-1)[rng.randrange(other.numel())] ^= rng.randint(1, 255)
        if not torch.equal(other, tensor):
            assert tensor_number(other, SEED) != whole
