"""A table of casts and copies writes what one call per tensor would have written."""

import math
import random

import numpy as np
import pytest
import torch

from sglang_fp8rl.lab.testing.cast_tables import table_of
from sglang_fp8rl.numerics import cast_into
from sglang_fp8rl.numerics.cast import copy_finite_into
from sglang_fp8rl.numerics.cpu import jit as cpu_jit
from sglang_fp8rl.numerics.cpu import table as cpu_table
from sglang_fp8rl.numerics.cpu.table import CpuTable
from sglang_fp8rl.numerics.write_table import LONGEST_ROW, PIECE, Kind, Piece

HIGH_PRECISION = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (128, 128), (127, 129), (300, 257), (5, 1000), (640, 384)]


class Case:
    """Sources inside larger tensors, and two copies of every destination."""

    def __init__(self, seed):
        generator, self.random = torch.Generator().manual_seed(seed), random.Random(seed)
        self.sent, self.views, self.kinds = [], [], []
        for shape in SHAPES:
            for kind in ("blockwise", "per_channel", *HIGH_PRECISION):
                dtype = self.random.choice(HIGH_PRECISION)
                rows, cols = shape
                sent = torch.randn(rows + 3, cols + 5, generator=generator).to(dtype)
                most = 9 if torch.float16 in (dtype, kind) else 20  # which FP16 holds
                sent *= 2.0 ** self.random.randint(-most, most)
                self.sent.append(sent)
                self.views.append(sent[2 : rows + 2, 1 : cols + 1])
                self.kinds.append(kind)
        self.expected = [
            self._destination(*one) for one in zip(self.views, self.kinds, strict=True)
        ]
        self.found = [self._destination(*one) for one in zip(self.views, self.kinds, strict=True)]

    @staticmethod
    def _destination(view, kind):
        rows, cols = view.shape
        if isinstance(kind, torch.dtype):
            return torch.full((rows, cols + 7), 3.0, dtype=kind)[:, 3 : cols + 3], None
        codes = torch.full((rows, cols + 7), 0x11, dtype=torch.uint8)[:, 3 : cols + 3]
        blocks = (rows, 1) if kind == "per_channel" else (-(-rows // 128), -(-cols // 128))
        return codes.view(torch.float8_e4m3fn), torch.full((blocks[0], blocks[1] + 2), 9.0)[:, 1:-1]

    def run(self, **rounding):
        """The same writes twice: one by one, and as a table. Returns both kinds of flags."""
        flags, pieces = [], []
        for number, (view, kind) in enumerate(zip(self.views, self.kinds, strict=True)):
            out, scales = self.expected[number]
            if isinstance(kind, torch.dtype):
                flags.append(copy_finite_into(view, out, backend="reference").reshape(-1, 1))
            elif kind == "per_channel":
                flags.append(cast_into(view, out, scales, (1, view.shape[1]), **rounding))
            else:
                flags.append(cast_into(view, out, scales, (128, 128), **rounding))
            out, scales = self.found[number]
            block = {"blockwise": (128, 128), "per_channel": (1, view.shape[1])}.get(kind, (1, 1))
            offset = view.data_ptr() - self.sent[number].data_ptr()
            what = Kind.COPY if scales is None else Kind.CAST
            pieces.append(((number, offset), Piece(view, out, scales, block, what)))
        assert all(piece.fits() for _, piece in pieces)
        table = table_of(pieces)
        defaults = {"pow2_scale": False, "round_to_bf16": True}
        runner = CpuTable(table, **{**defaults, **rounding})
        found = runner.run([sent.data_ptr() for sent in self.sent])
        return flags, [
            torch.from_numpy(table.flags_of(found, n).copy()) for n in range(len(pieces))
        ]

    def check(self, flags):
        expected_flags, found_flags = flags
        for number, kind in enumerate(self.kinds):
            where = (number, kind, tuple(self.views[number].shape))
            assert torch.equal(expected_flags[number].to(torch.uint8), found_flags[number]), where
            for one, two in zip(self.expected[number], self.found[number], strict=True):
                if one is not None:
                    assert torch.equal(_bytes(one), _bytes(two)), where


def _bytes(tensor):
    # Of the whole memory: what lies beside the destination has to stay as well.
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("threads", [1, 3])
def test_a_table_writes_the_bytes_of_one_call_per_tensor(seed, threads, monkeypatch):
    monkeypatch.setattr(cpu_jit, "WORTH_A_THREAD", 1000)  # or no second one is worth it
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    case = Case(seed)
    case.check(case.run())


@pytest.mark.parametrize("rounding", [{"pow2_scale": True}, {"round_to_bf16": False}])
def test_a_table_rounds_as_asked_and_copies_take_no_notice(rounding):
    case = Case(5)
    case.check(case.run(**rounding))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_blocks_and_rows_that_are_not_finite_keep_their_bytes_and_are_flagged(value):
    case = Case(7)
    spoiled = 0
    for view in case.views:
        for _ in range(2):
            view[case.random.randrange(view.shape[0]), case.random.randrange(view.shape[1])] = value
            spoiled += 1
    flags = case.run()
    case.check(flags)
    assert spoiled >= sum(int(one.sum()) for one in flags[1]) >= len(case.views)


def test_a_table_is_run_again_on_other_memory_of_the_same_layout():
    case = Case(9)
    case.run()
    moved = [sent.clone() * 2 for sent in case.sent]
    for number, view in enumerate(case.views):
        offset = view.storage_offset()
        case.views[number] = moved[number].as_strided(view.shape, view.stride(), offset)
    case.sent = moved
    case.check(case.run())


def test_bad_pieces_are_found_from_their_flags():
    views = [torch.zeros(3, 2), torch.zeros(1, 2), torch.zeros(4, 2)]
    table = table_of([((n, 0), Piece(v, v.clone())) for n, v in enumerate(views)])
    flags = np.zeros(table.flag_count, np.uint8)
    assert table.bad_pieces(flags) == []
    flags[[0, 2, 7]] = 1
    assert table.bad_pieces(flags) == [0, 2]
    assert table.flags_of(flags, 2).ravel().tolist() == [0, 0, 0, 1]


CODES = torch.zeros(4, 4).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "piece",
    [
        Piece(torch.zeros(4, 4).t()[:, :2], torch.zeros(4, 2)),
        Piece(torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.float64)),
        Piece(torch.zeros(4, 4), torch.zeros(4, 5)),
        Piece(torch.zeros(0, 4), torch.zeros(0, 4)),
        Piece(torch.zeros(1, LONGEST_ROW + 1), torch.zeros(1, LONGEST_ROW + 1)),
        Piece(torch.zeros(4, 4), CODES, None, (1, 1), Kind.CODES),
        Piece(CODES, CODES.clone()),
        Piece(torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2), kind=Kind.SCALES),
    ],
    ids=["transposed", "fp64", "shape", "empty", "long", "no codes", "codes alone", "bf16 scales"],
)
def test_what_the_kernels_do_not_know_does_not_fit(piece):
    assert not piece.fits()


def test_copying_keeps_rows_that_are_not_finite_whatever_the_layout():
    for source, out in (
        (torch.randn(3, 4, 5), torch.zeros(3, 4, 5, dtype=torch.bfloat16)),
        (torch.randn(6), torch.zeros(6, dtype=torch.bfloat16)),
        (torch.randn(5, 4).t(), torch.zeros(4, 5)),
    ):
        assert not copy_finite_into(source, out).any()
        assert torch.equal(out, source.to(out.dtype))
        worse = source.clone()
        worse[-1 if source.dim() == 1 else (-1, 0)] = float("nan")
        bad = copy_finite_into(worse * 2, out)
        assert int(bad.sum()) == 1
        kept = bad.reshape(source.shape[:-1]) if source.dim() > 1 else bad
        assert torch.equal(out[kept] if source.dim() > 1 else out, source.to(out.dtype)[kept]
                           if source.dim() > 1 else source.to(out.dtype))  # fmt: skip
        if source.dim() > 1:
            assert torch.equal(out[~kept], (source * 2).to(out.dtype)[~kept])


def test_the_work_is_every_row_once_and_scales_before_their_codes(monkeypatch):
    monkeypatch.setattr(cpu_table, "_ELEMENTS_PER_ITEM", 3000)
    pieces = np.zeros(60, PIECE)
    chosen = np.random.default_rng(0)
    pieces["rows"] = chosen.integers(1, 700, 60)
    pieces["cols"] = chosen.integers(1, 4000, 60)
    pieces["block_n"] = chosen.choice([1, 16, 128], 60)
    pieces["kind"] = chosen.choice([Kind.CAST, Kind.COPY, Kind.SCALES, Kind.CODES], 60)
    items, scales_end = cpu_table._items_of(pieces)
    assert len(items) > 10 * len(pieces)
    is_scales = pieces["kind"][items[:, 0]] == Kind.SCALES
    assert is_scales[:scales_end].all()
    assert not is_scales[scales_end:].any()
    for number, piece in enumerate(pieces):
        own = items[items[:, 0] == number]
        assert own[:, 1].tolist() == [0, *own[:-1, 2].tolist()]
        assert own[-1, 2] == piece["rows"]
        assert not (own[:, 1] % piece["block_n"]).any()
        assert len(own) == 1 or own[0, 2] * piece["cols"] <= max(
            3000, piece["block_n"] * piece["cols"]
        )


def test_a_table_of_nothing_has_no_work():
    items, scales_end = cpu_table._items_of(np.zeros(0, PIECE))
    assert items.shape == (0, 3)
    assert scales_end == 0


@pytest.mark.parametrize(("bits", "is_kept"), [(0x7F7F7FFF, False), (0x7F7F8000, True)])
def test_a_number_that_rounds_to_infinity_is_not_stored(bits, is_kept):
    """The last FP32 number that BF16 holds, and the one behind it."""
    source = torch.ones(3, 40)
    source[1, 7] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    old = torch.full((3, 40), 5.0, dtype=torch.bfloat16)
    by_table, by_copy, wide = old.clone(), old.clone(), source.new_full((3, 40), 5.0)
    pieces = [((0, 0), Piece(source, by_table)), ((0, 0), Piece(source, wide))]
    table = table_of(pieces)
    flags = CpuTable(table, pow2_scale=False, round_to_bf16=True).run([source.data_ptr()])
    expected = torch.where(torch.tensor([[False], [is_kept], [False]]), old, source.bfloat16())
    assert copy_finite_into(source, by_copy).tolist() == [False, is_kept, False]
    for out in (by_table, by_copy):
        assert torch.equal(out, expected)
        assert torch.isfinite(out).all()
    assert table.flags_of(flags, 0).ravel().tolist() == [0, int(is_kept), 0]
    assert torch.equal(wide, source)


def every_number(dtype, to):
    """All numbers of 16 bits; of FP32, those beside and halfway between any two that `to` has."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    if dtype != torch.float32:
        return every.view(dtype)[:, None].clone()
    held = every.view(torch.bfloat16 if to == torch.float32 else to).double()
    held[held.isinf()] = 2 * 2.0 ** math.floor(
        math.log2(torch.finfo(to).max)
    )  # what Inf begins halfway to
    ties = (held + held.roll(1)) / 2
    around = [
        where.float().view(torch.int32) + step for where in (held, ties) for step in (-1, 0, 1)
    ]
    return torch.cat(around).view(torch.float32)[:, None].clone()


@pytest.mark.parametrize("to", HIGH_PRECISION, ids=str)
@pytest.mark.parametrize("dtype", HIGH_PRECISION, ids=str)
def test_a_copy_rounds_every_number_as_torch_does_and_stores_none_that_overflows(dtype, to):
    pytest.importorskip("numba")
    source = every_number(dtype, to)
    out = torch.full(source.shape, 3.0, dtype=to)
    bad = copy_finite_into(source, out)
    rounded = source.to(to)
    assert torch.equal(bad[:, None], ~torch.isfinite(rounded))
    expected = torch.where(bad[:, None], torch.full_like(rounded, 3.0), rounded)
    assert torch.equal(_bytes(out), _bytes(expected))
