"""The GPU's table: the bytes of the CPU's, in Triton's interpreter here and on hardware there."""

import pytest
import torch
from support.numerics.interpreted import interpreted

pytest.importorskip("triton")

# The interpreter takes a tenth of a second for each full block: blocks in both directions, aligned and
# ragged, are in the few too.
FEW = [(128, 128), (7, 201), (1, 40), (130, 24)]
MANY = [(256, 384), (130, 152), (7, 1001), (1, 40), (128, 128)]


def pieces_on(device, shapes):
    """Aligned, ragged and spoiled blocks, channels, copies and pairs, in memory of `device`."""
    from sglang_fp8rl.numerics.write_table import Kind, Piece

    generator = torch.Generator().manual_seed(0)
    sent, pieces = [], []
    for number, shape in enumerate(shapes):
        for kind in ("blockwise", "per_channel", torch.float32, torch.bfloat16, torch.float16):
            dtype = (torch.float32, torch.bfloat16, torch.float16)[(number + len(pieces)) % 3]
            rows = shape[0] if kind == "blockwise" else min(shape[0], 5)  # the interpreter is slow
            tensor = torch.randn((rows, shape[1]), generator=generator) * 2.0 ** (number - 3)
            tensor = tensor.to(dtype)
            if number in (0, 2):
                tensor[rows - 1, 3] = float("nan")
            place = (len(sent), 0)
            sent.append(shifted(tensor, 0, device))
            if isinstance(kind, torch.dtype):
                out = torch.full(tensor.shape, 3.0, dtype=kind, device=device)
                pieces.append((place, Piece(sent[-1], out)))
                continue
            block = (128, 128) if kind == "blockwise" else (1, shape[1])
            blocks = (-(-rows // block[0]), -(-shape[1] // block[1]))
            codes = torch.full(tensor.shape, 0x11, dtype=torch.uint8, device=device)
            scales = torch.full(blocks, 9.0, device=device)
            codes = codes.view(torch.float8_e4m3fn)
            pieces.append((place, Piece(sent[-1], codes, scales, block, Kind.CAST)))
        for block_n in (128, 1):
            pieces += pair_pieces(sent, (min(shape[0], 9), shape[1]), block_n, generator, device)
    for dtype in (torch.float32, torch.bfloat16):  # a row as long as few models have one
        sent.append(torch.randn((2, 20_001), generator=generator).to(device, dtype))
        out = torch.full((2, 20_001), 3.0, dtype=dtype, device=device)
        pieces.append(((len(sent) - 1, 0), Piece(sent[-1], out)))
    pieces += pair_pieces(sent, (2, 20_000), 1, generator, device)
    return sent, pieces


def shifted(tensor, shift, device):
    room = torch.zeros(tensor.nbytes + 16, dtype=torch.uint8, device=device)
    room = room[-room.data_ptr() % 16 + shift :][: tensor.nbytes]
    return room.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def pair_pieces(sent, shape, block_n, generator, device):
    """Codes and their scales; a NaN, a zero, an Inf and a negative one among the scales, and NaN
    among the codes.
    """
    from sglang_fp8rl.numerics.write_table import Kind, Piece

    blocks = (-(-shape[0] // block_n), -(-shape[1] // 128) if block_n > 1 else 1)
    scales = torch.rand(blocks, generator=generator) + 0.5
    spoil = (float("nan"), 0.0, float("inf"), -1.0)[len(sent) % 4]
    if blocks[0] > 1:
        scales[blocks[0] // 2, -1] = spoil
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x80
    for row in range(min(4, shape[0] - 1)):  # each byte of a word once
        codes[row, 5 * row] = (0x7F, 0xFF)[row % 2]
    places, made = [], []
    for tensor in (scales, codes.view(torch.float8_e4m3fn)):
        places.append((len(sent), 0))
        sent.append(tensor.to(device))
    out_scales = torch.full(blocks, 9.0, device=device)
    out = torch.full(shape, 0x11, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    made.append((places[0], Piece(sent[-2], out_scales, kind=Kind.SCALES)))
    made.append((places[1], Piece(sent[-1], out, None, (block_n, 1), Kind.CODES)))
    assert all(piece.fits() for _, piece in made)
    return made


def check(device, shapes):
    """The bytes of the CPU's table, from aligned memory, then from memory that is not, then again."""
    from sglang_fp8rl.lab.testing.cast_tables import table_of
    from sglang_fp8rl.numerics.cpu.table import CpuTable
    from sglang_fp8rl.numerics.triton.table import TritonTable

    rounding = {"pow2_scale": False, "round_to_bf16": True}
    sent, pieces = pieces_on(torch.device("cpu"), shapes)
    expected = table_of(pieces)
    cpu_flags = CpuTable(expected, **rounding).run([t.data_ptr() for t in sent]).copy()
    gpu_sent, gpu_pieces = pieces_on(device, shapes)
    table = TritonTable(table_of(gpu_pieces), device, **rounding)
    ragged = [one.constants["RAGGED"] for one in table.launches if "RAGGED" in one.constants]
    assert set(ragged) == {True, False}
    for shift in (0, 8, 4):
        for (_, piece), (_, other) in zip(gpu_pieces, pieces, strict=True):
            assert piece.destination.shape == other.destination.shape
            piece.destination.view(torch.uint8).fill_(0x11)
            if piece.kind == 1:
                piece.destination.fill_(3.0)
            if piece.scales is not None or piece.kind == 2:
                (piece.destination if piece.scales is None else piece.scales).fill_(9.0)
        # One source in three lies elsewhere: the others keep their launch.
        moved = [
            shifted(
                one, shift if number % 3 == 0 and one.dtype != torch.float8_e4m3fn else 0, device
            )
            for number, one in enumerate(gpu_sent)
        ]
        flags = table.run([t.data_ptr() for t in moved])
        assert (flags == cpu_flags).all()
        assert flags.any()
        for (_, one), (_, other) in zip(pieces, gpu_pieces, strict=True):
            for left, right in ((one.destination, other.destination), (one.scales, other.scales)):
                if left is not None:
                    where = (shift, one.kind, one.source.shape, left.dtype)
                    assert torch.equal(_bytes(left), _bytes(right.cpu())), where
    for one in moved:
        (one.view(torch.uint8) if one.dtype == torch.float8_e4m3fn else one).fill_(1)
    assert not table.run([t.data_ptr() for t in moved]).any()


def _bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def check_on_cpu(shapes):
    check(torch.device("cpu"), shapes)


@pytest.mark.parametrize("shapes", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_the_interpreter_writes_the_bytes_of_the_cpu_table(shapes, tmp_path):
    interpreted(check_on_cpu, shapes, tmp_path)


@pytest.mark.gpu
def test_hardware_writes_the_bytes_of_the_cpu_table():
    check(torch.device("cuda"), MANY)


def test_the_tables_of_a_30b_model_take_less_than_16_mb():
    """Qwen3-30B-A3B: 18,432 expert matrices and 192 of attention, 1.8 million tiles."""
    import numpy as np

    from sglang_fp8rl.numerics.triton.table import TritonTable
    from sglang_fp8rl.numerics.write_table import CastTable

    shapes = [(768, 2048), (768, 2048), (2048, 768)] * 128
    shapes += [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096)]
    rows = [(0, 1, 0, 0, k, 16, 2, k, 16, -(-k // 128), 1, n, k, 128, 128) for n, k in shapes * 48]
    table = CastTable(np.array(rows), ())
    runner = TritonTable(table, torch.device("cpu"), pow2_scale=False, round_to_bf16=True)
    assert table.flag_count == 1_824_768
    assert len(runner.launches) == 1
    held = (runner._rows, runner._flags, runner._call, *(one.owners for one in runner.launches))
    assert sum(one.nbytes for one in held) < 16e6
    owners = runner.launches[0].owners.numpy()
    assert (np.bincount(owners) == [n * k // 16384 for n, k in shapes * 48]).all()
