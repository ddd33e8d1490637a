"""The GPU's table: the bytes of the CPU's, in Triton's interpreter here and on hardware there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

_SCRIPT = """
import sys, torch
import test_triton_table
test_triton_table.check(torch.device("cpu"), getattr(test_triton_table, sys.argv[1]))
"""
# The interpreter takes a tenth of a second for each full block: blocks in both directions, aligned and
# ragged, are in the few too.
FEW = [(128, 128), (5, 200), (1, 40), (130, 20)]
MANY = [(256, 384), (130, 150), (5, 1000), (1, 40), (128, 128)]


def pieces_on(device, shapes):
    """Aligned, ragged and spoiled blocks, channels, and copies, in memory of `device`."""
    from sglang_fp8rl.numerics.write_table import Piece

    generator = torch.Generator().manual_seed(0)
    sent, pieces = [], []
    for number, shape in enumerate(shapes):
        for kind in ("blockwise", "per_channel", torch.float32, torch.bfloat16):
            dtype = (torch.float32, torch.bfloat16)[(number + len(sent)) % 2]
            tensor = (torch.randn(shape, generator=generator) * 2.0 ** (number - 3)).to(dtype)
            if number in (0, 2):
                tensor[shape[0] - 1, 3] = float("nan")
            tensor = tensor.to(device)
            place = (len(sent), 0)
            sent.append(tensor)
            if isinstance(kind, torch.dtype):
                out = torch.full(shape, 3.0, dtype=kind, device=device)
                pieces.append(Piece(place, tensor, out))
                continue
            block = (128, 128) if kind == "blockwise" else (1, shape[1])
            blocks = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
            codes = torch.full(shape, 0x11, dtype=torch.uint8, device=device)
            scales = torch.full(blocks, 9.0, device=device)
            codes = codes.view(torch.float8_e4m3fn)
            pieces.append(Piece(place, tensor, codes, scales, block))
        for block_n in (128, 1):
            pieces += pair_pieces(sent, shape, block_n, generator, device)
    return sent, pieces


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
    made.append(Piece(places[0], sent[-2], out_scales, kind=Kind.SCALES))
    made.append(Piece(places[1], sent[-1], out, None, (block_n, 1), Kind.CODES))
    assert all(piece.fits() for piece in made)
    return made


def check(device, shapes):
    from sglang_fp8rl.numerics.cpu.table import CpuTable
    from sglang_fp8rl.numerics.triton.table import TritonTable
    from sglang_fp8rl.numerics.write_table import CastTable

    rounding = {"pow2_scale": False, "round_to_bf16": True}
    sent, pieces = pieces_on(torch.device("cpu"), shapes)
    expected = CastTable.of(pieces)
    cpu_flags = CpuTable(expected, **rounding).run([t.data_ptr() for t in sent])
    gpu_sent, gpu_pieces = pieces_on(device, shapes)
    table = TritonTable(CastTable.of(gpu_pieces), device, **rounding)
    flags = table.run([t.data_ptr() for t in gpu_sent])
    assert (flags == cpu_flags).all()
    assert flags.any()
    for one, other in zip(pieces, gpu_pieces, strict=True):
        for left, right in ((one.destination, other.destination), (one.scales, other.scales)):
            if left is not None:
                assert torch.equal(_bytes(left), _bytes(right.cpu())), (one.view.shape, left.dtype)
    for kernel in ("table_block_kernel", "table_codes_kernel"):
        launches = [one for one in table._launches if one.kernel.fn.__name__ == kernel]
        assert {launch.constants["ALIGNED"] for launch in launches} == {True, False}


def _bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("shapes", ["FEW", pytest.param("MANY", marks=pytest.mark.slow)])
def test_the_interpreter_writes_the_bytes_of_the_cpu_table(shapes):
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, shapes],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_hardware_writes_the_bytes_of_the_cpu_table():
    check(torch.device("cuda"), MANY)


@pytest.mark.parametrize(("kind", "source_load"), [(0, "ld.global.v4"), (1, "ld.global.v4")])
def test_aligned_blocks_compile_to_wide_loads_and_exact_division(kind, source_load):
    ptx = compiled("table_block_kernel", {"ALIGNED": True, "KIND": kind})
    assert source_load in ptx
    assert "div.rn.f32" in ptx
    assert "div.full" not in ptx
    assert "ftz" not in ptx


@pytest.mark.parametrize("constants", [{"COPY": True, "CHUNK": 1024}, {"COPY": False, "CHUNK": 64}])
def test_rows_compile(constants):
    ptx = compiled("table_row_kernel", {**constants, "KIND": 0})
    assert ("div.rn.f32" in ptx) is not constants["COPY"]


def test_codes_compile_to_copies_of_four_at_a_time():
    assert "ld.global.v4.b32" in compiled("table_codes_kernel", {"ALIGNED": True, "CHUNK": 4096})
    assert compiled("table_scales_kernel", {"CHUNK": 64})


def compiled(name, constants):
    """PTX for Hopper; needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sglang_fp8rl.numerics.triton import table as triton_table

    kernel = getattr(triton_table, name)
    if "KIND" in constants:
        constants = {**constants, "POW2": False, "ROUND": True}
    types = {"table": "*i64", "items": "*i32", "addresses": "*i64", "flags": "*i8"}
    position = {argument: i for i, argument in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs={(position[key],): value for key, value in constants.items()},
        attrs={(position[key],): [["tt.divisibility", 16]] for key in types},
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]


def test_the_table_s_columns_are_where_the_kernels_look():
    from sglang_fp8rl.numerics.triton import table as kernels
    from sglang_fp8rl.numerics.write_table import PIECE

    names = list(PIECE.names)
    assert len(names) == kernels._FIELDS.value
    for constant, field in (
        ("_SOURCE", "source"),
        ("_SOURCE_OFFSET", "source_offset"),
        ("_SOURCE_STRIDE", "source_stride"),
        ("_TARGET", "destination"),
        ("_TARGET_DTYPE", "destination_dtype"),
        ("_TARGET_STRIDE", "destination_stride"),
        ("_SCALES", "scales"),
        ("_SCALES_STRIDE0", "scales_stride0"),
        ("_SCALES_STRIDE1", "scales_stride1"),
        ("_ROWS", "rows"),
        ("_COLS", "cols"),
        ("_FLAGS", "flags"),
        ("_FLAG_COLS", "flag_cols"),
    ):
        assert getattr(kernels, constant).value == names.index(field), constant
