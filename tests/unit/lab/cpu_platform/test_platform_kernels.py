"""The CPU platform's W8A8 linears against an oracle in FP64 that works value by value."""

from __future__ import annotations

import math

import pytest
import torch
from support.numerics.oracle_fp8 import nearest_e4m3

from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.lab.cpu_platform import cpu_linear
from sglang_fp8rl.lab.cpu_platform.cpu_linear import (
    apply_fp8_linear,
    block_fp8_linear,
    quantize_per_token_group,
    widened,
)

BLOCK = [128, 128]
E4M3 = torch.float8_e4m3fn


def oracle_activations(x: torch.Tensor, group: int) -> torch.Tensor:
    """What the kernel sees: each row's groups rounded to e4m3 times an FP32 scale, in FP64."""
    result = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], group):
            values = x[row, start : start + group].float()
            scale = max(values.abs().max(), torch.tensor(1e-10)) / 448
            result[row, start : start + group] = nearest_e4m3(values / scale) * scale.double()
    return result


def oracle_block_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    result = weight.double()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            result[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] *= scale[i, j].double()
    return result


def activations(name: str, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    x = torch.randn(rows, columns, generator=generator)
    if name == "group_of_zeros":
        x[:, :128] = 0
    elif name == "tiny":
        x *= 1e-30
    elif name == "one_outlier":
        x[0, columns // 2] = 1e4
    elif name == "magnitudes_apart":
        x *= torch.logspace(-6, 6, columns)
    return x.bfloat16()


def weights(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every finite code, and scales twelve orders of magnitude apart from tile to tile."""
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E  # no NaN
    tiles = (math.ceil(rows / 128), math.ceil(columns / 128))
    return codes.view(E4M3), torch.logspace(-6, 6, tiles[0] * tiles[1]).view(tiles)


ACTIVATIONS = ["plain", "group_of_zeros", "tiny", "one_outlier", "magnitudes_apart"]
SHAPES = [(1, 128, 128), (3, 256, 384), (5, 200, 300), (2, 17, 129), (4, 1, 7)]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_activations_round_to_nearest_with_the_group_s_own_scale(
    name: str, m: int, n: int, k: int
) -> None:
    x = activations(name, m, k)
    q, scale = quantize_per_token_group(x, 128)
    assert q.shape == (m, k)
    assert scale.shape == (m, math.ceil(k / 128))
    spread = scale.double().repeat_interleave(128, dim=1)[:, :k]
    assert torch.equal(q.double() * spread, oracle_activations(x, 128))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_block_linear_is_the_exact_product_to_output_rounding(
    name: str, m: int, n: int, k: int
) -> None:
    x = activations(name, m, k).float()  # FP32 in, FP32 out: rounding of the output is out of it
    weight, scale = weights(n, k)
    got = block_fp8_linear(x, weight, BLOCK, scale)
    exact_x, exact_w = oracle_activations(x, 128), oracle_block_weight(weight, scale)
    bound = 1e-6 * (exact_x.abs() @ exact_w.abs().t())  # FP32 accumulation over blocks
    assert ((got.double() - exact_x @ exact_w.t()).abs() <= bound).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("scale_shape", [(-1, 1), (1, -1)])
def test_channel_linear_is_the_exact_product_to_output_rounding(
    name: str, m: int, n: int, k: int, scale_shape: tuple[int, int]
) -> None:
    x = activations(name, m, k).float()
    weight, _ = weights(n, k)
    scale = torch.logspace(-6, 6, n)
    got = apply_fp8_linear(x, weight.t(), scale.view(scale_shape))
    exact = oracle_activations(x, k) @ (weight.double() * scale.double()[:, None]).t()
    assert torch.allclose(got.double(), exact, rtol=1e-5, atol=0)


def test_a_row_does_not_depend_on_its_batch() -> None:
    x = activations("plain", 64, 300)
    weight, scale = weights(200, 300)
    channel_scale = torch.rand(200, 1)
    block = block_fp8_linear(x, weight, BLOCK, scale)
    channel = apply_fp8_linear(x, weight.t(), channel_scale)
    for start, stop in [(0, 1), (5, 7), (3, 36), (63, 64)]:
        part = x[start:stop]
        assert torch.equal(block_fp8_linear(part, weight, BLOCK, scale), block[start:stop])
        assert torch.equal(apply_fp8_linear(part, weight.t(), channel_scale), channel[start:stop])


def test_a_column_shard_gives_the_columns_of_the_whole() -> None:
    x = activations("plain", 8, 256)
    weight, scale = weights(512, 256)
    whole = block_fp8_linear(x, weight, BLOCK, scale)
    shard = block_fp8_linear(x, weight[256:], BLOCK, scale[2:])
    assert torch.equal(shard, whole[:, 256:])


def test_bias_leading_dimensions_and_dtype() -> None:
    x = activations("plain", 6, 128).view(2, 3, 128)
    weight, scale = weights(128, 128)
    bias = torch.randn(128).bfloat16()
    got = block_fp8_linear(x, weight, BLOCK, scale, bias=bias)
    assert got.shape == (2, 3, 128)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, block_fp8_linear(x, weight, BLOCK, scale) + bias)


def test_input_quantized_before_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = activations("plain", 4, 300)
    weight, scale = weights(200, 300)
    q, x_scale = quantize_per_token_group(x, 128)
    whole = block_fp8_linear(x, weight, BLOCK, scale)
    assert torch.equal(block_fp8_linear(q, weight, BLOCK, scale, input_scale=x_scale), whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_codes_become_their_exact_values_whatever_the_strides(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch.float8_e4m3fn)
    for one in (codes, codes.t(), codes[3:, ::2]):
        values = widened(one, dtype)
        assert values.dtype == dtype
        torch.testing.assert_close(values, one.to(dtype), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(values.signbit(), one.to(dtype).signbit())  # -0.0 too


def test_sums_in_fp32_are_near_the_exact_ones_and_not_them(monkeypatch):
    """The switch changes the order and the roundings of a sum, and nothing else."""
    x = activations("magnitudes_apart", 64, 1024)
    weight, scale = weights(256, 1024)
    rows = torch.full((256, 1), 0.01)
    exact = [block_fp8_linear(x.float(), weight, BLOCK, scale)]
    exact.append(apply_fp8_linear(x.float(), weight.t(), rows))
    monkeypatch.setattr(cpu_linear, "sum_dtype", lambda: torch.float32)
    fast = [block_fp8_linear(x.float(), weight, BLOCK, scale)]
    fast.append(apply_fp8_linear(x.float(), weight.t(), rows))
    for one, other in zip(fast, exact, strict=True):
        assert not torch.equal(one, other)
        # Not of each element: where terms cancel, an FP32 sum keeps the error of the terms.
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_a_switch_that_is_neither_0_nor_1_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setenv(cpu_linear.FP32_SUMS_VARIABLE, "yes")
    with pytest.raises(ConfigError, match=f"{cpu_linear.FP32_SUMS_VARIABLE}.*'yes'"):
        cpu_linear.sum_dtype.__wrapped__()


def test_sums_are_exact_unless_fp32_is_asked_for(monkeypatch):
    monkeypatch.delenv(cpu_linear.FP32_SUMS_VARIABLE, raising=False)
    assert cpu_linear.sum_dtype.__wrapped__() is torch.float64
    monkeypatch.setenv(cpu_linear.FP32_SUMS_VARIABLE, "1")
    assert cpu_linear.sum_dtype.__wrapped__() is torch.float32
