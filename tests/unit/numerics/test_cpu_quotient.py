"""The CPU cast multiplies where the reference divides: every case there is, not a sample.

A BF16 number has 8 significant bits, so a source has 128 mantissas and a scale, which is such a
number divided by 448, has 128 too. Powers of two only move the exponent, until something leaves the
normal range; those cases are tried by themselves.
"""

from __future__ import annotations

import pytest
import torch
from support.by_definition import quantize_blockwise

from sglang_fp8rl import numerics

MANTISSAS = 1 + torch.arange(128) / 128


def assert_as_the_reference(x: torch.Tensor, pow2_scale: bool) -> None:
    """`x`: [128 * n, 128], a block for each scale."""
    codes = torch.empty(x.shape, dtype=numerics.FP8_DTYPE)
    scales = torch.empty(x.shape[0] // 128, 1)
    numerics.cast_into(x, codes, scales, (128, 128), pow2_scale=pow2_scale)
    expected, expected_scales = quantize_blockwise(x, pow2_scale=pow2_scale)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


def blocks(exponent: int) -> torch.Tensor:
    """For each of 128 mantissas of the amax one block, with every mantissa at 21 exponents."""
    sources = torch.outer(2.0 ** torch.arange(0, -21, -1), MANTISSAS).flatten()
    sources = torch.cat([sources, -sources])
    block = torch.zeros(128 * 128)
    made = []
    for mantissa in MANTISSAS:
        block[: sources.numel()] = torch.where(sources.abs() <= mantissa, sources, 0)
        block[-1] = mantissa
        made.append(block.clone())
    return torch.stack(made).view(-1, 128) * 2.0**exponent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pow2_scale", [False, True])
def test_every_mantissa_over_every_scale_gives_the_code_of_the_quotient(dtype, pow2_scale):
    x = blocks(0).to(dtype)
    assert x.abs().amax() < 2
    assert_as_the_reference(x, pow2_scale)


@pytest.mark.parametrize("exponent", [-126, -110, -100, -93, -92, -85, -84, -83, -82, -60, 60, 127])
def test_at_the_ends_of_the_range_too(exponent):
    assert_as_the_reference(blocks(exponent), False)


def test_what_rounds_to_zero_keeps_its_sign():
    x = torch.tensor(
        [448.0, 2.0**-11, -(2.0**-11), -(2.0**-40), 0.0, -0.0, 2.0**-140, -(2.0**-140)]
    )
    x = torch.nn.functional.pad(x, (0, 120)).repeat(128, 1)
    codes, scales = torch.empty(128, 128, dtype=numerics.FP8_DTYPE), torch.empty(1, 1)
    numerics.cast_into(x, codes, scales, (128, 128))
    assert codes[0, :8].view(torch.uint8).tolist() == [126, 0, 128, 128, 0, 128, 0, 128]
