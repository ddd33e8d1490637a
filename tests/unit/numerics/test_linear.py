"""The product with stored codes: the definition against FP64 by value, and what the operator takes."""

from __future__ import annotations

import pytest
import torch
from support.numerics.linear_cases import BLOCK, case

from sglang_fp8rl.errors import QuantizationError
from sglang_fp8rl.lab.cpu_platform.cpu_linear import exact_linear
from sglang_fp8rl.numerics import FP8_DTYPE, dequantize
from sglang_fp8rl.numerics.linear import doubled, linear

SHAPES = [(1, 128, 128), (5, 200, 384), (3, 130, 256)]


@pytest.mark.parametrize("block", [BLOCK, None], ids=["blocks", "rows"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_product_with_the_dequantized_weight(shape, block):
    x, codes, scale = case(*shape, block, dtype=torch.float32)
    held = block or (1, codes.shape[1])
    weight = dequantize(codes, scale, held, torch.float32).double()
    exact = x.double() @ weight.t()
    bound = 1e-6 * (x.double().abs() @ weight.abs().t())
    found = exact_linear(x, codes, scale).double()
    assert ((found - exact).abs() <= bound).all()


@pytest.mark.parametrize("block", [BLOCK, None], ids=["blocks", "rows"])
def test_a_row_does_not_depend_on_its_batch(block):
    x, codes, scale = case(40, 70, 256, block)
    whole = exact_linear(x, codes, scale)
    for rows in (slice(0, 1), slice(3, 20), slice(39, 40)):
        assert torch.equal(exact_linear(x[rows], codes, scale), whole[rows])


def test_a_nan_code_and_a_scale_that_was_never_written_are_seen():
    x, codes, scale = case(2, 256, 256, BLOCK)
    codes.view(torch.uint8)[5, 7] = 0x7F
    scale[1, 0] = float("nan")
    found = exact_linear(x, codes, scale)
    assert found[:, 5].isnan().all()
    assert found[:, 128:].isnan().all()
    assert found[:, :128].isnan().sum() == 2


def test_the_operator_says_a_shape_and_a_dtype_without_running():
    with torch.device("meta"):
        x = torch.empty(3, 128, dtype=torch.bfloat16)
        codes, scale = torch.empty(96, 128, dtype=FP8_DTYPE), torch.empty(1, 1)
    found = linear(x, codes, scale)
    assert (found.shape, found.dtype) == ((3, 96), torch.bfloat16)


def test_the_operator_is_one_that_torch_can_trace():
    x, codes, scale = case(3, 130, 256, BLOCK)
    # "test_schema" multiplies the codes, which no CPU can.
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(linear, (x, codes, scale), test_utils=checks)
    assert torch.equal(linear(x, codes, scale), exact_linear(x, codes, scale))


@pytest.mark.gpu
def test_fp32_activations_are_refused():
    """Tensor cores would round them to TF32."""
    x, codes, scale = (one.cuda() for one in case(1, 128, 128, BLOCK))
    for product in (lambda: linear(x.float(), codes, scale), lambda: doubled(x.float(), 128)):
        with pytest.raises(QuantizationError, match=r"x: torch\.float32"):
            product()
