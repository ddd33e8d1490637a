"""The public cast gives the reference's bytes and errors, and does not run it."""

import pytest
import torch
from support import by_definition
from support.numerics.numerics_cases import CASES, ROUNDINGS, bits, same_bits
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import sglang_fp8rl
from sglang_fp8rl import numerics
from sglang_fp8rl.errors import QuantizationError
from sglang_fp8rl.formats import FORMATS
from sglang_fp8rl.numerics import reference

# Of each where the first of the two blocks is that are spoiled below.
NAMES = {
    "quantize_blockwise": "block (1, 2), rows 128:256, columns 256:300",
    "quantize_per_channel": "block (130, 0), rows 130:131, columns 0:300",
}
HOMES = (sglang_fp8rl, by_definition)


@pytest.mark.parametrize("function", NAMES)
@pytest.mark.parametrize("name", CASES)
def test_gives_the_bytes_of_the_reference(name, function):
    source = CASES[name]
    before = bits(source.clone())
    for options in ROUNDINGS:
        codes, scale = getattr(sglang_fp8rl, function)(source, **options)
        expected, expected_scale = getattr(by_definition, function)(source, **options)
        assert same_bits(codes, expected)
        assert same_bits(scale, expected_scale)
        assert codes.is_contiguous()
        assert scale.is_contiguous()
    assert torch.equal(bits(source.clone()), before)


def _never(*args, **kwargs):
    raise AssertionError("the reference was run")


@pytest.fixture
def without_the_reference(monkeypatch):
    """What of the reference makes codes raises."""
    pytest.importorskip("numba")
    monkeypatch.setattr(reference, "cast_into", _never)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_cpu_nothing_public_runs_the_reference(without_the_reference, dtype):
    source = torch.ones(130, 140, dtype=dtype)
    for function in NAMES:
        codes, scale = getattr(sglang_fp8rl, function)(source)
        assert (codes.float() == 448).all()
        assert (scale == torch.tensor(1 / 448)).all()
    for held in FORMATS.values():
        grid = held.grid(source.shape)
        codes = torch.empty(130, 140, dtype=numerics.FP8_DTYPE)
        scale = torch.empty(grid.scale_shape)
        assert not numerics.cast_into(source, codes, scale, grid.block).any()
        assert (codes.float() == 448).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3.3962e38])
def test_what_is_not_finite_is_named_with_its_block(bad, transposed):
    source = torch.ones(300, 300)
    source[130, 299] = source[299, 0] = bad
    if transposed:
        source = source.t().contiguous().t()
    for function, place in NAMES.items():
        said = set()
        for home in HOMES:
            with pytest.raises(QuantizationError) as error:
                getattr(home, function)(source, name="layers.3.up_proj.weight")
            said.add(str(error.value))
        (text,) = said
        assert text.startswith(f"layers.3.up_proj.weight: NaN or Inf in {place} (2 of ")


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    ("source", "said"),
    [
        (torch.ones(4, 4, dtype=torch.float64), "dtype torch.float64"),
        (torch.ones(4, 4, dtype=torch.int32), "dtype torch.int32"),
        (torch.ones(4, 4).to(numerics.FP8_DTYPE), "float8_e4m3fn.*weight_scale_inv"),
        (torch.ones(4), r"shape \[4\]"),
        (torch.ones(2, 4, 4), r"shape \[2, 4, 4\]"),
        (torch.ones(0, 4), r"shape \[0, 4\]"),
    ],
)
def test_refuses_what_is_no_weight(source, said, home):
    for function in NAMES:
        with pytest.raises(QuantizationError, match=said):
            getattr(home, function)(source)


def freed() -> torch.Tensor:
    """The second half of a tensor that FSDP freed."""
    whole = torch.ones(8, 4)
    half = whole[4:]
    whole.untyped_storage().resize_(0)
    return half


@pytest.mark.parametrize("made", [freed, lambda: TwoTensor(torch.ones(4, 4), torch.ones(4, 4))])
def test_refuses_what_has_no_memory_where_kernels_would_read(made):
    for function in NAMES:
        with pytest.raises(QuantizationError, match=r"matrix .* in memory.*freed or wrapped"):
            getattr(sglang_fp8rl, function)(made())


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("block_size", [(128,), (0, 128), (128, -1), (128, 1.5), (True, 128)])
def test_refuses_a_block_that_is_none(block_size, home):
    with pytest.raises(QuantizationError, match="two positive integers"):
        home.quantize_blockwise(torch.ones(4, 4), block_size)


@pytest.mark.gpu
def test_on_a_gpu_the_bytes_are_the_reference_s_and_it_is_not_run(monkeypatch):
    expected = {
        (name, function): getattr(by_definition, function)(source)
        for name, source in CASES.items()
        for function in NAMES
    }
    monkeypatch.setattr(reference, "cast_into", _never)
    for (name, function), wanted in expected.items():
        made = getattr(sglang_fp8rl, function)(CASES[name].cuda())
        for actual, one in zip(made, wanted, strict=True):
            assert actual.is_cuda
            assert same_bits(actual.cpu(), one), (name, function)


def test_the_reference_computes_without_memory_as_compilers_do():
    with FakeTensorMode():
        served = numerics.through_fp8(torch.randn(4, 6), (2, 2), backend="reference")
    assert (served.shape, served.dtype) == ((4, 6), torch.bfloat16)
