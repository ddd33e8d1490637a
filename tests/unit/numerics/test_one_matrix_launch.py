"""One matrix is one launch: nothing is uploaded or pinned, and its flags are all that is allocated."""

import pytest
import torch

pytest.importorskip("triton")

from support.numerics.fake_gpu import Operations, fake_gpu

from sglang_fp8rl.formats import FORMATS
from sglang_fp8rl.formats.format import BlockGrid
from sglang_fp8rl.numerics import FP8_DTYPE, cast_into
from sglang_fp8rl.numerics.cast import copy_finite_into
from sglang_fp8rl.numerics.fingerprint import Matrix
from sglang_fp8rl.numerics.triton import kernels, matrix
from sglang_fp8rl.numerics.triton.arithmetic import Constant
from sglang_fp8rl.numerics.triton.fingerprint import LaidOut

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def launched(call):
    """What `call` launches, and the torch operations that it takes."""
    with fake_gpu() as gpu, Operations() as operations:
        call()
    return gpu.launches, operations.done


@pytest.fixture
def nothing_is_pinned(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("memory was pinned")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(256, 384), (130, 257)])
def test_a_cast_is_one_launch_and_one_allocation(shape, name, nothing_is_pinned):
    source, codes = torch.randn(shape), torch.empty(shape, dtype=FP8_DTYPE)
    grid = FORMATS[name].grid(shape)
    blocks = grid.scale_shape
    scales = torch.empty(blocks)
    launches, operations = launched(
        lambda: cast_into(source, codes, scales, grid.block, backend="triton")
    )
    assert operations == ["aten.empty.memory_format"]
    assert [one.grid for one in launches] == [(blocks[0] * blocks[1], 1, 1)]


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 96), (300,), (2, 3, 40)], ids=str)
def test_a_copy_in_high_precision_is_one_launch_and_one_allocation(shape, to, nothing_is_pinned):
    source, out = torch.randn(shape), torch.empty(shape, dtype=to)
    launches, operations = launched(lambda: copy_finite_into(source, out, backend="triton"))
    assert operations == ["aten.empty.memory_format"]
    rows = source.numel() // shape[-1] if len(shape) > 1 else 1
    assert [one.grid for one in launches] == [(rows, 1, 1)]


def test_matrices_of_all_sizes_share_a_kernel():
    """Or the first refit would wait for a compiler at every other layer."""
    kernels = set()
    for rows, columns, step in ((256, 384, 384), (128, 16384, 16400), (1280, 128, 128)):
        source = torch.randn(rows, step)[:, :columns]
        codes = torch.empty(rows, columns, dtype=FP8_DTYPE)
        scales = torch.empty(BlockGrid((rows, columns), (128, 128)).scale_shape)
        with fake_gpu() as gpu:
            cast_into(source, codes, scales, (128, 128), backend="triton")
        kernels |= {one.compiled for one in gpu.launches}
    assert len(kernels) == 1


def test_a_number_is_one_launch_and_its_own_memory_whatever_it_is_of(nothing_is_pinned):
    kernels = set()
    for seed, shape in (
        (5 << 40, (7, 96)),
        ((1 << 64) - (5 << 40), (300, 16)),
        (1 << 63, (1, 4096)),
    ):
        matrix = Matrix(torch.zeros(shape, dtype=torch.bfloat16), 0, 0, seed)
        launches, operations = launched(LaidOut([(0, matrix)], 1).start)
        assert operations == ["aten.zeros.default"]
        assert [one.grid for one in launches] == [(-(-shape[0] // 64) * -(-shape[1] // 256), 1, 1)]
        kernels |= {one.compiled for one in launches}
    assert len(kernels) == 1


def test_what_no_kernel_takes_is_left_to_torch():
    wide = torch.randn(2, matrix.CHUNKS[-1] + 1)
    strided, doubles = torch.randn(8, 6).t(), torch.randn(3, 4).double()
    for source in (wide, strided, doubles):
        out = torch.empty(source.shape, dtype=torch.bfloat16)
        launches, _ = launched(lambda: copy_finite_into(source, out, backend="triton"))  # noqa: B023
        assert not launches
        assert torch.equal(out, source.bfloat16())


def test_a_launch_compares_no_constant_by_its_value():
    """Triton asks of each whether it has changed since it compiled."""
    kernels.table_cast_kernel.cache_key  # noqa: B018 which looks for them
    constants = kernels.table_cast_kernel.used_global_vals
    assert len(constants) > 10
    assert all((held[name] != then) is False for (name, _), (then, held) in constants.items())
    assert Constant(1) != Constant(2)
