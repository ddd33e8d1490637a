"""What the product with stored codes becomes on a GPU: codes read once, 16 bytes a thread, and converted in registers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from linear_code import DOUBLED_LIMIT, HOPPER_SHARED, compiled, compiled_doubled, tile_for
from sass import compile_kernel

from sglang_fp8rl.numerics.triton import fingerprint, kernels
from sglang_fp8rl.numerics.triton import linear as products
from sglang_fp8rl.numerics.write_table import DTYPES

SMALL, LARGE = 4096, 24576  # rows of Qwen3-8B's narrowest layer and of its widest
GPUS = [90, 100]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_nothing_is_spilled_and_a_tile_fits(n, gpu):
    odd = {"whole": False, "is_aligned": False}  # 1368 columns: DeepSeek-V2-Lite on eight ranks
    for how in ({}, {"blockwise": False, "whole": False}, odd, {"blockwise": False, **odd}):
        code = compiled(n, gpu, **how)
        assert code.spilled == 0
        assert code.shared <= HOPPER_SHARED


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_codes_are_converted_in_registers_two_at_a_time(n, gpu):
    code = compiled(n, gpu)
    codes = tile_for(n).codes_per_thread
    assert code.count("F2FP.F16.E4M3", in_loop=True) == codes // 2
    assert code.count("F2FP.BF16", in_loop=True) == codes // 2
    assert code.count("F2F.", in_loop=True) == 0  # a quarter of their speed
    assert code.count("ST", in_loop=True) <= 2  # Blackwell's tensor memory


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_a_small_batch_is_read_in_sixteen_bytes_and_few_instructions(n, gpu):
    code, tile = compiled(n, gpu), tile_for(n)
    wide = code.widths("LDGSTS", in_loop=True)
    assert wide == {16: (tile.codes_per_thread + tile.bytes_of_x_per_thread) // 16, 4: 1}
    assert len(code.loop) <= 4.5 * tile.codes_per_thread


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("group", [128, 4096, 12288])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_doubled_in_wide_accesses_and_registers(dtype, group, gpu):
    code, elements = compiled_doubled(group, gpu, dtype=dtype)
    assert code.spilled == 0
    assert code.registers <= 80
    assert code.widths("LDG") == {16: elements // 8}
    assert code.widths("STG") == {16: 2 * elements // 8}
    assert len(code.executed) <= DOUBLED_LIMIT * elements
    assert "div.rn.f32" in code.ptx  # of the quotient too: its codes are the definition's
    assert "div.full" not in code.ptx


POINTERS = {"x": "*i16", "out": "*i16", "codes": "*i8", "weight_scale": "*fp32", "output": "*bf16"}
CONSTANTS = {
    "linear_kernel": products.tile_of(SMALL) | {"BLOCKWISE": True, "WHOLE": False},
    "doubled_kernel": products.doubled_tile(128) | {"KIND": DTYPES[torch.bfloat16], "POW2": False},
}


def sizes_of(kernel) -> list[str]:
    """Arguments that Triton makes the constant 1 where they are 1: those it may, but for pointers."""
    return [
        one.name
        for one in kernel.params
        if not (one.is_constexpr or one.do_not_specialize or one.name in POINTERS)
    ]


KERNELS = {
    name: kernel
    for module in (fingerprint, kernels, products)
    for name, kernel in vars(module).items()
    if name.endswith("_kernel")
}
OF_TABLES = {"table", "owners", "call", "flags", "matrices", "numbers"}  # pointers as well
SIZES = [
    (name, size) for name in KERNELS for size in sizes_of(KERNELS[name]) if size not in OF_TABLES
]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_a_kernel_compiles_where_a_size_is_one(name, size):
    """One token, one column: the doubled rows of one token once failed at a server's first answer."""
    kernel, constants = KERNELS[name], dict(CONSTANTS[name])
    options = {one: constants.pop(one) for one in ("num_warps", "maxnreg") if one in constants}
    types = {
        one.name: POINTERS.get(one.name, "i32") for one in kernel.params if not one.is_constexpr
    }
    if name == "linear_kernel":
        types["x"] = "*bf16"
    del types[size]
    assert compile_kernel(kernel, constants | {size: 1}, types=types, **options).executed
