"""Codes that come with their scales, in a table: copied as they are, and never one without the other."""

import pytest
import torch
from support.by_definition import quantize_blockwise, quantize_per_channel

from sglang_fp8rl.lab.testing.cast_tables import table_of
from sglang_fp8rl.numerics.cast import has_nan_code
from sglang_fp8rl.numerics.cpu.table import CpuTable
from sglang_fp8rl.numerics.write_table import NAN_CODE, Kind, Piece

ROUNDING = {"pow2_scale": False, "round_to_bf16": True}


def made(shape, quantize, block_n):
    codes, scales = quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    scales = scales.reshape(-(-shape[0] // block_n), -1)
    old_codes = torch.full(shape, 0x11, dtype=torch.uint8).view(torch.float8_e4m3fn)
    old_scales = torch.full_like(scales, 9.0)
    pieces = [
        ((0, 0), Piece(scales, old_scales, kind=Kind.SCALES)),
        ((1, 0), Piece(codes, old_codes, None, (block_n, 1), Kind.CODES)),
    ]
    assert all(piece.fits() for _, piece in pieces)
    table = table_of(pieces)
    return codes, scales, old_codes, old_scales, table, CpuTable(table, **ROUNDING)


CASES = [(quantize_blockwise, 128), (quantize_per_channel, 1)]


@pytest.mark.parametrize(("quantize", "block_n"), CASES)
@pytest.mark.parametrize("shape", [(1, 1), (300, 257), (512, 640)])
def test_a_pair_is_copied_byte_for_byte(shape, quantize, block_n):
    codes, scales, old_codes, old_scales, table, runner = made(shape, quantize, block_n)
    flags = runner.run([scales.data_ptr(), codes.data_ptr()])
    assert not flags.any()
    assert table.bad_pieces(flags) == []
    assert torch.equal(old_codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(old_scales, scales)


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("quantize", "block_n"), CASES)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_with_a_bad_scale_keeps_codes_and_scales(
    value, quantize, block_n, threads, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    codes, scales, old_codes, old_scales, table, runner = made((300, 257), quantize, block_n)
    scales[1, -1] = value
    flags = runner.run([scales.data_ptr(), codes.data_ptr()])
    assert table.bad_pieces(flags) == [1]
    assert table.flags_of(flags, 1).nonzero()[0].tolist() == [1]
    kept = slice(block_n, 2 * block_n)
    assert (old_codes.view(torch.uint8)[kept] == 0x11).all()
    assert (old_scales[1] == 9.0).all()
    others = torch.ones(300, dtype=torch.bool)
    others[kept] = False
    assert torch.equal(old_codes.view(torch.uint8)[others], codes.view(torch.uint8)[others])
    assert torch.equal(old_scales[2:], scales[2:])


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize(("quantize", "block_n"), CASES)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_with_a_nan_among_its_codes_keeps_its_codes(
    code, quantize, block_n, threads, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    codes, scales, old_codes, _, table, runner = made((300, 257), quantize, block_n)
    codes.view(torch.uint8)[130, 256] = code
    addresses = [scales.data_ptr(), codes.data_ptr()]
    flags = runner.run(addresses)
    assert table.bad_pieces(flags) == [1]
    found = table.flags_of(flags, 1).ravel()
    assert found.nonzero()[0].tolist() == [130 // block_n]
    assert found.max() == NAN_CODE
    others = torch.arange(300) != 130
    assert (old_codes.view(torch.uint8)[130] == 0x11).all()
    assert torch.equal(old_codes.view(torch.uint8)[others], codes.view(torch.uint8)[others])
    codes.view(torch.uint8)[130, 256] = 0x7E
    assert not runner.run(addresses).any()
    assert torch.equal(old_codes.view(torch.uint8), codes.view(torch.uint8))


def test_two_of_the_256_codes_are_nan():
    every = torch.arange(256, dtype=torch.uint8)
    found = [has_nan_code(code.view(torch.float8_e4m3fn).view(1, 1)) for code in every]
    assert torch.tensor(found).nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert not has_nan_code(torch.zeros(0, 4).to(torch.float8_e4m3fn))
    assert has_nan_code(every.view(torch.float8_e4m3fn).view(16, 16)[:, 3::4])


def test_scales_run_first_wherever_they_are():
    codes, scales, old_codes, old_scales, _table, _ = made((300, 257), quantize_blockwise, 128)
    plain = torch.randn(4, 8)
    out = torch.zeros(4, 8)
    pieces = [
        ((2, 0), Piece(plain, out)),
        ((0, 0), Piece(scales, old_scales, kind=Kind.SCALES)),
        ((1, 0), Piece(codes, old_codes, None, (128, 1), Kind.CODES)),
    ]
    runner = CpuTable(table_of(pieces), **ROUNDING)
    assert runner._items[0].tolist() == [1, 0, 3]
    runner.run([scales.data_ptr(), codes.data_ptr(), plain.data_ptr()])
    assert torch.equal(out, plain)
    assert torch.equal(old_codes.view(torch.uint8), codes.view(torch.uint8))
