"""What the GPU kernels become: wide loads and stores, few instructions, IEEE arithmetic; no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from sass import compile_kernel

from sglang_fp8rl.numerics.triton import fingerprint, kernels
from sglang_fp8rl.numerics.triton.matrix import cast_options, constants_of
from sglang_fp8rl.numerics.write_table import BF16, FP16, FP32

ALIGNED = {"SOURCE_ALIGN": 16, "TARGET_ALIGN": 16}
PACKED = {"POW2": False, "ROUND": True, "PACKED": True}
ELEMENTS = 64  # of a tile, per thread


KINDS = [(BF16, 10), (FP16, 12), (FP32, 12)]


def cast(kernel, chunk, constants, capability=90, *, ragged=False):
    options = cast_options(chunk, ragged, constants["TARGET_ALIGN"])
    constants = {**constants, **{name: options.pop(name) for name in [*options] if name.isupper()}}
    if kernel is kernels.matrix_cast_kernel:
        constants["THROUGH"] = False
    return compile_kernel(kernel, constants, capability, **options)


def tile(kind, ragged, capability=90, kernel=kernels.table_cast_kernel, **constants):
    constants = {**ALIGNED, **PACKED, "KIND": kind, **constants}
    return cast(kernel, 0, constants, capability, ragged=ragged)


def assert_ieee(code):
    assert "div.rn.f32" in code.ptx
    assert "div.full" not in code.ptx
    assert "ftz" not in code.ptx


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("kind", "limit"), KINDS)
@pytest.mark.parametrize("kernel", [kernels.table_cast_kernel, kernels.matrix_cast_kernel])
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
        (kernels.table_cast_kernel, 2048),
        (kernels.table_cast_kernel, 16384),
        (kernels.matrix_cast_kernel, 8192),
    ],
)
def test_a_channel_is_read_once_in_wide_loads(kernel, chunk, kind):
    code = cast(kernel, chunk, {**ALIGNED, **PACKED, "KIND": kind})
    assert code.registers <= 64
    elements = chunk // (32 * cast_options(chunk, True, 16)["num_warps"])
    assert code.widths("LDG")[16] == elements * 2 // 16
    assert code.widths("STG")[16] == elements // 16
    assert len(code.executed) <= 13 * elements


@pytest.mark.parametrize("to", [FP32, BF16, FP16])
def test_a_row_of_one_matrix_is_copied_in_wide_stores(to):
    constants = {**ALIGNED, "KIND": FP32, "TO": to, "PACKED": True, "CHUNK": 4096}
    code = compile_kernel(kernels.matrix_copy_kernel, constants, num_warps=4)
    assert code.widths("LDG")[16] == 8
    assert code.widths("STG")[16] == (8 if to == FP32 else 4)
    assert len(code.executed) <= 13 * 32
    assert code.spilled == 0


def test_a_copied_row_is_read_once_in_wide_loads():
    constants = {**ALIGNED, "KIND": BF16, "TO": BF16, "SCALES": False, "PACKED": True}
    constants["CHUNK"] = 4096
    code = compile_kernel(kernels.table_copy_kernel, constants, num_warps=4)
    assert code.widths("LDG")[16] == code.widths("STG")[16] == 4


def test_codes_are_copied_sixteen_at_a_time():
    constants = {**ALIGNED, "CHUNK": 4096}
    code = compile_kernel(kernels.table_codes_kernel, constants, num_warps=4)
    assert code.widths("LDG")[16] == code.widths("STG")[16] == 2
    constants |= {"KIND": FP32, "TO": FP32, "SCALES": True, "PACKED": True, "CHUNK": 64}
    assert compile_kernel(kernels.table_copy_kernel, constants, num_warps=1).executed


def through(source, *, per_row=False, capability=90, round_to_bf16=True):
    """`through_fp8` of a matrix, with an address of its own, and how many elements a thread has."""
    target = torch.empty(source.shape, dtype=torch.bfloat16)
    rounding = {"POW2": False, "ROUND": round_to_bf16}
    constants = {**constants_of(source, target, per_row, rounding), "PACKED": round_to_bf16}
    options = {name: constants.pop(name) for name in [*constants] if not name.isupper()}
    code = compile_kernel(kernels.matrix_cast_kernel, constants, capability, **options)
    return code, constants["HEIGHT"] * constants["WIDTH"] // (32 * options["num_warps"])


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("shape", [(256, 384), (200, 328)], ids=["whole", "ragged"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_cast_and_back_is_few_instructions_and_wide_accesses(dtype, shape, capability):
    code, elements = through(torch.empty(shape, dtype=dtype), capability=capability)
    assert elements == ELEMENTS
    assert len(code.executed) <= 14 * elements
    is_ragged = shape[0] % 128 != 0
    assert code.registers <= (72 if dtype == torch.float32 and is_ragged else 64)
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
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


def numbers(kernel, align, capability=90):
    constants = {"ALIGN": align, "HEIGHT": fingerprint.HEIGHT, "LANES": fingerprint.LANES}
    kinds = {"matrices": "*i64", "owners": "*i32", "numbers": "*i64"}
    names = [name for name in kernel.arg_names if name not in constants]
    options = {"types": {name: kinds.get(name, "i64") for name in names}}
    return compile_kernel(kernel, constants, capability, num_warps=fingerprint.WARPS, **options)


KERNELS = pytest.mark.parametrize(
    "kernel",
    [fingerprint.numbers_kernel, fingerprint.matrix_number_kernel],
    ids=lambda one: one.__name__,
)
ROWS = fingerprint.HEIGHT // fingerprint.WARPS  # that a thread reads


@KERNELS
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_a_fingerprint_is_at_most_twelve_instructions_an_element_in_wide_loads(kernel, capability):
    code = numbers(kernel, 16, capability)
    assert len(code.executed) <= 12 * (ROWS * 16 // 2)  # of BF16; of FP8 half as many each
    assert code.widths("LDG")[16] == ROWS
    assert code.registers <= 128  # four programs of 128 threads on a multiprocessor
    assert code.spilled == 0


@KERNELS
@pytest.mark.parametrize("align", [4, 2, 1])
def test_a_fingerprint_of_odd_rows_reads_each_byte_once_and_spills_nothing(kernel, align):
    code = numbers(kernel, align)
    assert code.widths("LDG")[align] >= ROWS
    assert len(code.executed) <= 64 * ROWS
    assert code.spilled == 0
