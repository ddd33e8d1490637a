"""What the GPU kernels become: wide loads and stores, few instructions, IEEE arithmetic; no GPU."""

import pytest

pytest.importorskip("triton")

from sass import compile_kernel

from sglang_fp8rl.numerics.triton import matrix, table_kernels
from sglang_fp8rl.numerics.triton.matrix import row_warps, tile_options
from sglang_fp8rl.numerics.write_table import Dtype

FP32, BF16, FP16 = map(int, (Dtype.FP32, Dtype.BF16, Dtype.FP16))
ALIGNED = {"SOURCE_ALIGN": 16, "TARGET_ALIGN": 16}
PACKED = {"POW2": False, "ROUND": True, "PACKED": True}
ELEMENTS = 64  # of a tile, per thread


KINDS = [(BF16, 10), (FP16, 12), (FP32, 12)]


def tile(kind, ragged, capability=90, kernel=table_kernels.table_tile_kernel, **constants):
    constants = {**ALIGNED, **PACKED, "KIND": kind, "RAGGED": ragged, **constants}
    options = tile_options(constants["TARGET_ALIGN"])
    return compile_kernel(kernel, constants, capability, **options)


def assert_ieee(code):
    assert "div.rn.f32" in code.ptx
    assert "div.full" not in code.ptx
    assert "ftz" not in code.ptx


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("kind", "limit"), KINDS)
@pytest.mark.parametrize("kernel", [table_kernels.table_tile_kernel, matrix.matrix_tile_kernel])
def test_a_tile_is_few_instructions_and_wide_accesses(kernel, kind, limit, ragged):
    code = tile(kind, ragged, kernel=kernel)
    assert len(code.executed) <= limit * ELEMENTS
    assert code.registers <= 64
    assert code.spilled == 0
    size = 4 if kind == FP32 else 2
    assert code.widths("LDG")[16] == ELEMENTS * size // 16
    assert code.widths("STG")[16] == ELEMENTS // 16
    assert_ieee(code)


@pytest.mark.parametrize("kind", [BF16, FP32])
def test_a_source_eight_bytes_off_keeps_its_wide_stores(kind):
    code = tile(kind, False, SOURCE_ALIGN=8)
    assert len(code.executed) <= 12 * ELEMENTS
    assert code.widths("STG")[16] == ELEMENTS // 16
    assert code.widths("LDG")[16] == 0


@pytest.mark.parametrize("capability", [89, 100])
def test_other_gpus_have_the_packed_instructions_too(capability):
    code = tile(BF16, True, capability)
    assert "cvt.rn.satfinite.e4m3x2.f32" in code.ptx
    assert len(code.executed) <= 12 * ELEMENTS


def test_older_gpus_and_unrounded_sources_divide():
    code = tile(FP32, False, 80, PACKED=False, ROUND=False)
    assert "cvt.rn.satfinite" not in code.ptx
    assert_ieee(code)


@pytest.mark.parametrize("kind", [BF16, FP16])
@pytest.mark.parametrize(
    ("kernel", "chunk"),
    [
        (table_kernels.table_row_kernel, 2048),
        (table_kernels.table_row_kernel, 16384),
        (matrix.matrix_row_kernel, 8192),
    ],
)
def test_a_channel_is_read_once_in_wide_loads(kernel, chunk, kind):
    constants = {**ALIGNED, **PACKED, "KIND": kind, "CHUNK": chunk}
    options = {"num_warps": row_warps(chunk)}
    code = compile_kernel(kernel, constants, **options)
    assert code.registers <= 64
    elements = chunk // (32 * row_warps(chunk))
    assert code.widths("LDG")[16] == elements * 2 // 16
    assert code.widths("STG")[16] == elements // 16
    assert len(code.executed) <= 13 * elements


@pytest.mark.parametrize("to", [FP32, BF16, FP16])
def test_a_row_of_one_matrix_is_copied_in_wide_stores(to):
    constants = {**ALIGNED, "KIND": FP32, "TO": to, "PACKED": True, "CHUNK": 4096}
    code = compile_kernel(matrix.matrix_copy_kernel, constants, num_warps=4)
    assert code.widths("LDG")[16] == 8
    assert code.widths("STG")[16] == (8 if to == FP32 else 4)
    assert len(code.executed) <= 13 * 32
    assert code.spilled == 0


def test_a_copied_row_is_read_once_in_wide_loads():
    constants = {**ALIGNED, "KIND": BF16, "TO": BF16, "SCALES": False, "PACKED": True}
    constants["CHUNK"] = 4096
    code = compile_kernel(table_kernels.table_copy_kernel, constants, num_warps=4)
    assert code.widths("LDG")[16] == code.widths("STG")[16] == 4


def test_codes_are_copied_sixteen_at_a_time():
    constants = {**ALIGNED, "CHUNK": 4096}
    code = compile_kernel(table_kernels.table_codes_kernel, constants, num_warps=4)
    assert code.widths("LDG")[16] == code.widths("STG")[16] == 2
    constants |= {"KIND": FP32, "TO": FP32, "SCALES": True, "PACKED": True, "CHUNK": 64}
    assert compile_kernel(table_kernels.table_copy_kernel, constants, num_warps=1).executed
