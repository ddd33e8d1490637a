"""The cast and back: every backend gives the bytes of codes times scales."""

from __future__ import annotations

import pytest
import torch
from support.numerics.numerics_cases import ROUNDINGS

from sglang_fp8rl.errors import QuantizationError
from sglang_fp8rl.numerics import dequantize, quantize, through_fp8
from sglang_fp8rl.numerics.backends import is_there

BLOCKS = {
    "blocks": (128, 128),
    "rows": (1, 300),
    "rows of two ranks": (1, 150),
    "odd rows": (1, 128),
    "odd blocks": (96, 64),
}
BACKENDS = ["reference", *(["numba"] if is_there("numba") else [])]


def weight(dtype: torch.dtype, rows: int = 200) -> torch.Tensor:
    """Magnitudes over many binades, zeros of both signs, an empty block and the smallest numbers."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(rows, 300, generator=generator)
    w *= torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator).float())
    w[0, :4], w[1, :4] = 0.0, -0.0
    w[:, 256:] = 0.0
    w[130:, :128] *= 1e-38 if dtype != torch.float16 else 1e-3
    return w.to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_codes_times_scales(backend, block, dtype):
    w = weight(dtype)
    for options in ROUNDINGS:
        codes, scale = quantize(w, block, backend="reference", **options)
        expected = dequantize(codes, scale, block)
        found = through_fp8(w, block, backend=backend, **options)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), options


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_bf16_number_in_blocks_of_every_mantissa(backend):
    """Where a quotient is a tie, its side depends on the mantissa of the amax."""
    numbers = torch.arange(0x3000, 0x4400, dtype=torch.int16).view(torch.bfloat16)
    amaxes = torch.arange(0x4400, 0x4480, dtype=torch.int16).view(torch.bfloat16)
    w = torch.cat([amaxes[:, None], numbers.expand(128, -1), -numbers.expand(128, -1)], 1)
    codes, scale = quantize(w, (1, w.shape[1]), backend="reference")
    found = through_fp8(w, (1, w.shape[1]), backend=backend)
    assert torch.equal(found, dequantize(codes, scale))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_in_its_block(backend, dtype):
    w = weight(dtype)
    sound = through_fp8(w, (128, 128))
    w[5, 3], w[140, 130] = torch.nan, -torch.inf
    found = through_fp8(w, (128, 128), backend=backend)
    expected = sound.clone()
    for box in ((slice(0, 128), slice(0, 128)), (slice(128, 200), slice(128, 256))):
        expected[box] = w[box].to(torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_transposed_views_and_large_matrices_in_threads(backend):
    w = torch.randn(300, 200).t()
    assert torch.equal(
        through_fp8(w, (128, 128), backend=backend), through_fp8(w.contiguous(), (128, 128))
    )
    large = torch.randn(2304, 2048, dtype=torch.bfloat16)
    codes, scale = quantize(large, (128, 128))
    assert torch.equal(through_fp8(large, (128, 128), backend=backend), dequantize(codes, scale))


def test_a_stack_or_another_dtype_is_refused_by_name():
    with pytest.raises(QuantizationError, match=r"up: shape \[2, 3, 4\]"):
        through_fp8(torch.zeros(2, 3, 4), (128, 128), name="up")
    with pytest.raises(QuantizationError, match="float64"):
        through_fp8(torch.zeros(3, 4).double(), (128, 128))
