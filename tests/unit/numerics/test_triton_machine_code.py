"""What the GPU kernels become: wide loads and stores, few instructions, IEEE arithmetic; no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from sass import compile_kernel

from sglang_fp8rl.numerics.triton import table_kernels
from sglang_fp8rl.numerics.triton.table import row_warps, tile_options
from sglang_fp8rl.numerics.triton.through import through_kernel, tile_of

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
    constants = {**ALIGNED, "KIND": BF16, "TO_FP32": False, "SCALES": False, "PACKED": True}
    constants["CHUNK"] = 4096
    code = compile_kernel(table_kernels.table_copy_kernel, constants, num_warps=4)
    assert code.widths("LDG")[16] == code.widths("STG")[16] == 4


def test_codes_are_copied_sixteen_at_a_time():
    constants = {**ALIGNED, "CHUNK": 4096}
    code = compile_kernel(table_kernels.table_codes_kernel, constants, num_warps=4)
    assert code.widths("LDG")[16] == code.widths("STG")[16] == 2
    constants |= {"KIND": FP32, "TO_FP32": True, "SCALES": True, "PACKED": True, "CHUNK": 64}
    assert compile_kernel(table_kernels.table_copy_kernel, constants, num_warps=1).executed


def through(source, *, per_row=False, capability=90, round_to_bf16=True):
    """`through_fp8` of a matrix, with an address of its own, and how many elements a thread has."""
    kind = FP32 if source.dtype == torch.float32 else BF16
    tile = tile_of(source, per_row)
    types = {
        "source": "*i16" if kind == BF16 else "*i32",
        "out": "*i16",
        "rows": "i32",
        "cols": "i32",
    }
    constants = {**PACKED, "ROUND": round_to_bf16, "PACKED": round_to_bf16, "KIND": kind, **tile}
    warps = constants.pop("num_warps")
    code = compile_kernel(through_kernel, constants, capability, types=types, num_warps=warps)
    return code, tile["HEIGHT"] * tile["WIDTH"] // (32 * warps)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("shape", [(256, 384), (200, 328)], ids=["whole", "ragged"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_cast_and_back_is_few_instructions_and_wide_accesses(dtype, shape, capability):
    code, elements = through(torch.empty(shape, dtype=dtype), capability=capability)
    assert elements == ELEMENTS
    assert len(code.executed) <= 14 * elements
    assert code.registers <= 64
    assert code.spilled == 0
    assert code.widths("LDG") == {16: elements * dtype.itemsize // 16}
    assert code.widths("STG") == {16: elements * 2 // 16}
    assert code.ptx.count("div.rn.f32") == 2  # of a block: its scale, and that one's reciprocal
    assert_ieee(code)


@pytest.mark.parametrize(
    ("shape", "per_row"),
    [
        ((200, 330), False),
        ((200, 329), False),
        ((7, 576), True),
        ((7, 4096), True),
        ((7, 5001), True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_cast_and_back_of_odd_rows_is_at_most_twice_as_much(dtype, shape, per_row):
    code, elements = through(torch.empty(shape, dtype=dtype), per_row=per_row)
    assert len(code.executed) <= 28 * elements
    assert code.spilled == 0


def test_the_cast_and_back_knows_how_the_source_is_aligned():
    memory = torch.empty(256 * 384 + 8, dtype=torch.bfloat16)
    code, elements = through(memory[4:-4].view(256, 384))
    assert code.widths("LDG") == {8: elements * 2 // 8}
    assert code.spilled == 0


def test_the_cast_and_back_without_the_step_to_bf16_divides():
    code, _ = through(torch.empty(256, 384), round_to_bf16=False)
    assert "cvt.rn.satfinite" not in code.ptx
    assert_ieee(code)
