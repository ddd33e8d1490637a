"""What the GPU kernels become: wide loads and stores, few instructions, IEEE arithmetic; no GPU."""

import pytest

pytest.importorskip("triton")

from sass import compile_kernel

from sglang_fp8rl.numerics.triton import table_kernels
from sglang_fp8rl.numerics.triton.table import row_warps, tile_options

FP32, BF16 = 0, 1
ALIGNED = {"SOURCE_ALIGN": 16, "TARGET_ALIGN": 16}
PACKED = {"POW2": False, "ROUND": True, "PACKED": True}
ELEMENTS = 64  # of a tile, per thread


def tile(kind, ragged, capability=90, **constants):
    constants = {**ALIGNED, **PACKED, "KIND": kind, "RAGGED": ragged, **constants}
    options = tile_options(constants["TARGET_ALIGN"])
    return compile_kernel(table_kernels.table_tile_kernel, constants, capability, **options)


def assert_ieee(code):
    assert "div.rn.f32" in code.ptx
    assert "div.full" not in code.ptx
    assert "ftz" not in code.ptx


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("kind", "limit"), [(BF16, 10), (FP32, 12)])
def test_a_tile_is_few_instructions_and_wide_accesses(kind, limit, ragged):
    code = tile(kind, ragged)
    assert len(code.executed) <= limit * ELEMENTS
    assert code.registers <= 64
    assert code.spilled == 0
    size = 2 if kind == BF16 else 4
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


@pytest.mark.parametrize("chunk", [2048, 16384])
def test_a_channel_is_read_once_in_wide_loads(chunk):
    constants = {**ALIGNED, **PACKED, "KIND": BF16, "CHUNK": chunk}
    options = {"num_warps": row_warps(chunk)}
    code = compile_kernel(table_kernels.table_row_kernel, constants, **options)
    elements = chunk // (32 * row_warps(chunk))
    assert code.widths("LDG")[16] == elements * 2 // 16
    assert code.widths("STG")[16] == elements // 16
    assert len(code.executed) <= 13 * elements


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
