"""What the product with stored codes becomes on a GPU: codes read once, 16 bytes a thread, and converted in registers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from linear_code import HOPPER_SHARED, compiled, tile_for

SMALL, LARGE = 4096, 24576  # rows of Qwen3-8B's narrowest layer and of its widest
TILES = [(1, SMALL), (1, LARGE), (32, SMALL), (32, LARGE), (64, SMALL), (64, LARGE), (512, SMALL)]
GPUS = [90, 100]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("m", "n"), TILES)
def test_nothing_is_spilled_and_a_tile_fits(m, n, gpu):
    other = {"blockwise": False, "whole": False, "bias": True}
    for code in (compiled(m, n, gpu), compiled(m, n, gpu, **other)):
        assert code.spilled == 0
        assert code.shared <= HOPPER_SHARED


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("m", "n"), TILES)
def test_codes_are_converted_in_registers_two_at_a_time(m, n, gpu):
    code = compiled(m, n, gpu)
    codes = tile_for(m, n).codes_per_thread
    assert code.count("F2FP.F16.E4M3", in_loop=True) == codes // 2
    assert code.count("F2FP.BF16", in_loop=True) == codes // 2
    assert code.count("F2F.", in_loop=True) == 0  # a quarter of their speed
    assert code.count("ST", in_loop=True) <= 2  # Blackwell's tensor memory


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("m", "n"), TILES[:4])
def test_a_small_batch_is_read_in_sixteen_bytes_and_few_instructions(m, n, gpu):
    code, tile = compiled(m, n, gpu), tile_for(m, n)
    wide = code.widths("LDGSTS", in_loop=True)
    assert wide == {16: (tile.codes_per_thread + tile.bytes_of_x_per_thread) // 16, 4: 1}
    assert len(code.loop) <= (4.5 if m == 1 else 6) * tile.codes_per_thread


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("m", "n"), TILES[4:])
def test_a_large_batch_runs_on_the_gpu_s_own_tensor_cores(m, n, gpu):
    code = compiled(m, n, gpu)
    assert code.count("HGMMA" if gpu == 90 else "UTCHMMA", in_loop=True) > 0
    assert set(code.widths("LDGSTS", in_loop=True)) <= {16, 8, 4}
