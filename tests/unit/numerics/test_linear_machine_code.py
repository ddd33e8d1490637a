"""What the product with stored codes becomes on a GPU: codes read once, 16 bytes a thread, and converted in registers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from linear_code import DOUBLED_LIMIT, HOPPER_SHARED, compiled, compiled_doubled, tile_for

SMALL, LARGE = 4096, 24576  # rows of Qwen3-8B's narrowest layer and of its widest
GPUS = [90, 100]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_nothing_is_spilled_and_a_tile_fits(n, gpu):
    for code in (compiled(n, gpu), compiled(n, gpu, blockwise=False, whole=False)):
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
