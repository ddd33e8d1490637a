"""The reference cast against exact rational arithmetic."""

import struct
from fractions import Fraction

import hypothesis.strategies as st
import numpy
import pytest
import torch
from hypothesis import given, settings
from support.by_definition import quantize_blockwise, quantize_per_channel
from support.numerics import oracle_fp8
from support.numerics.numerics_cases import CASES, bits, same_bits

from sglang_fp8rl.errors import QuantizationError
from sglang_fp8rl.lab.sensitivity.sqnr import sqnr_db
from sglang_fp8rl.numerics import (
    FP8_DTYPE,
    cast_into,
    dequantize,
)


def _float32(pattern: int) -> float:
    return struct.unpack("<f", struct.pack("<I", pattern))[0]


# Everything from -inf-less bits, plus values near 1 so that a block's codes are not all zero.
ANY_FP32 = st.integers(0, 2**32 - 1).filter(lambda p: p & 0x7FFFFFFF < 0x7F7F8000).map(_float32)
NEAR_ONE = st.integers(0x3B000000, 0x40FFFFFF).map(_float32)
TIES = st.builds(
    lambda upper, lower, sign: _float32(sign << 31 | upper << 16 | lower),
    st.integers(0x3B00, 0x43E0),
    st.sampled_from([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]),
    st.integers(0, 1),
)
SPECIAL = st.sampled_from([0.0, -0.0, 448.0, -448.0, 1.0, _float32(1), _float32(0x00800000)])
VALUES = st.one_of(NEAR_ONE, TIES, SPECIAL, ANY_FP32)


@st.composite
def matrices(draw):
    rows, cols = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    values = draw(st.lists(VALUES, min_size=rows * cols, max_size=rows * cols))
    return [values[r * cols : (r + 1) * cols] for r in range(rows)]


@settings(max_examples=300, deadline=None)
@given(matrices(), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.booleans(), st.booleans())
@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_equals_exact_arithmetic(backend, matrix, block_size, pow2_scale, round_to_bf16):
    if backend == "numba":
        pytest.importorskip("numba")
    rows, cols = len(matrix), len(matrix[0])
    source = torch.tensor(matrix, dtype=torch.float32)
    options = {"pow2_scale": pow2_scale, "round_to_bf16": round_to_bf16}
    block_n, block_k = block_size
    qweight = torch.full((rows, cols), 0x7F, dtype=torch.uint8).view(FP8_DTYPE)
    scales = torch.full((-(-rows // block_n), -(-cols // block_k)), -7.0)
    cast_into(source, qweight, scales, block_size, backend=backend, **options)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            region = (
                slice(i * block_n, (i + 1) * block_n),
                slice(j * block_k, (j + 1) * block_k),
            )
            block = [v for row in matrix[region[0]] for v in row[region[1]]]
            codes, scale = oracle_fp8.quantize_block(block, **options)
            assert Fraction(scales[i, j].item()) == scale
            assert bits(qweight)[region].flatten().tolist() == codes


def test_the_oracle_agrees_with_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    patterns = numpy.arange(0, 0x43E10000, 0x1357, dtype=numpy.uint32)
    values = numpy.minimum(patterns.view(numpy.float32), numpy.float32(448.0))
    theirs = values.astype(ml_dtypes.float8_e4m3fn).view(numpy.uint8)
    for value, code in zip(values[::17].tolist(), theirs[::17].tolist(), strict=True):
        rounded = oracle_fp8.round_to_nearest_even(Fraction(value), *oracle_fp8.E4M3)
        assert oracle_fp8.CODE_OF[rounded] == code
    bf16 = values.astype(ml_dtypes.bfloat16).astype(numpy.float32)
    for value, expected in zip(values[::17].tolist(), bf16[::17].tolist(), strict=True):
        assert oracle_fp8.round_to_nearest_even(Fraction(value), *oracle_fp8.BF16) == expected


def test_bf16_step_is_observable():
    x = CASES["a distribution per tile"]
    with_step, _ = quantize_blockwise(x)
    without, _ = quantize_blockwise(x, round_to_bf16=False)
    changed = (bits(with_step) != bits(without)).double().mean().item()
    assert 0.005 < changed < 0.05
    already, _ = quantize_blockwise(x.bfloat16().float(), round_to_bf16=False)
    assert same_bits(already, with_step)


def test_exact_division_is_observable():
    """All quotients of one binade against NumPy and ml_dtypes; a reciprocal gives other codes."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = CASES["every amax of a binade"].numpy()
    scale = x.max(axis=1, keepdims=True) / numpy.float32(448)

    def codes(y):
        e4m3 = numpy.minimum(y, numpy.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        return torch.from_numpy(e4m3.view(numpy.uint8))

    qweight, weight_scale = quantize_per_channel(torch.from_numpy(x))
    assert torch.equal(weight_scale, torch.from_numpy(scale))
    assert torch.equal(bits(qweight), codes(x / scale))
    assert (bits(qweight) != codes(x * (1 / scale))).any()


@pytest.mark.parametrize("name", [n for n, x in CASES.items() if x.dtype == torch.float32])
def test_source_dtype_does_not_matter(name):
    narrow = CASES[name].bfloat16()
    for quantize in (quantize_blockwise, quantize_per_channel):
        for a, b in zip(quantize(narrow), quantize(narrow.float()), strict=True):
            assert same_bits(a, b)


def test_blocks_don_t_see_each_other():
    x = CASES["a distribution per tile"]
    qweight, scale = quantize_blockwise(x)
    for i, r in enumerate(range(0, x.shape[0], 128)):
        for j, c in enumerate(range(0, x.shape[1], 128)):
            tile = (slice(r, r + 128), slice(c, c + 128))
            alone, alone_scale = quantize_blockwise(x[tile])
            assert same_bits(qweight[tile], alone)
            assert scale[i, j] == alone_scale[0, 0]


def test_largest_value_of_every_block_gets_the_largest_code():
    qweight, _ = quantize_blockwise(CASES["a distribution per tile"])
    for rows in qweight.float().abs().split(128, 0):
        for tile in rows.split(128, 1):
            assert tile.max() == 448.0


def test_zero_block_has_scale_one_and_keeps_signs():
    qweight, scale = quantize_blockwise(CASES["zero block with negative zeros"])
    assert scale[0, 1] == 1.0
    expected = torch.zeros(128, 128, dtype=torch.uint8)
    expected[::3] = 0x80
    assert torch.equal(bits(qweight)[:, 128:], expected)


def test_scale_is_never_subnormal():
    for name in ("subnormals", "amax / 448 is subnormal"):
        for pow2_scale in (False, True):
            _, scale = quantize_blockwise(CASES[name], pow2_scale=pow2_scale)
            assert (scale == torch.finfo(torch.float32).tiny).all()


def test_pow2_scale_is_the_next_power_of_two_up():
    _, exact = quantize_blockwise(CASES["a distribution per tile"])
    _, rounded = quantize_blockwise(CASES["a distribution per tile"], pow2_scale=True)
    assert (rounded.frexp().mantissa == 0.5).all()
    assert ((rounded >= exact) & (rounded < 2 * exact)).all()
    power = torch.full((4, 4), 448.0 * 2.0**-20)
    assert quantize_blockwise(power, pow2_scale=True)[1].item() == 2.0**-20


def test_dequantize_inverts_within_half_an_ulp():
    x = CASES["576x1368"].bfloat16().float()
    for qweight, scale in (quantize_blockwise(x), quantize_per_channel(x)):
        y = dequantize(qweight, scale, dtype=torch.float32)
        assert sqnr_db(x, y) > 31
        spread = (
            scale
            if scale.shape[1] == 1
            else scale.repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)[:, :1368]
        )
        half_ulp = torch.maximum(x.abs() / 16, spread * 2.0**-10) * (1 + 1e-6)
        assert ((x - y).abs() <= half_ulp).all()
    assert same_bits(dequantize(qweight, scale[:, 0]), dequantize(qweight, scale))
    assert dequantize(qweight, scale).dtype == torch.bfloat16


def test_dequantize_refuses_scales_of_another_weight():
    qweight, scale = quantize_blockwise(CASES["127x257"])
    with pytest.raises(QuantizationError, match=r"shape \[1, 2\] for codes \[127, 257\]"):
        dequantize(qweight, scale[:, :2])


def test_sqnr():
    x = torch.tensor([3.0, 4.0])
    assert sqnr_db(x, x + torch.tensor([0.3, 0.4])) == pytest.approx(20.0, abs=1e-4)
    assert sqnr_db(x, x) == float("inf")
    with pytest.raises(ValueError, match="differ"):
        sqnr_db(x, x[:1])
