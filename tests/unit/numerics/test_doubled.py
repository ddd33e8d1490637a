"""Rows and what quantizing leaves of them: the same bytes by every kernel, and BF16's bits in two e4m3 numbers."""

from __future__ import annotations

import pytest
import torch
from support.numerics.interpreted import interpreted

from sglang_fp8rl.lab.cpu_platform.cpu_linear import quantize_per_token_group
from sglang_fp8rl.lab.sensitivity.sqnr import sqnr_db
from sglang_fp8rl.numerics.linear import doubled

GROUPS = {"blocks": 128, "rows": None}


def activations(m: int, k: int, dtype: torch.dtype, *, outliers: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(m * k)
    x = torch.randn(m, k, generator=generator)
    x[:, :: k // 7 + 1] *= 200.0 if outliers else 1.0
    x[m // 2, : k // 2] = 0.0
    return x.to(dtype)


JOBS = [
    (activations(m, k, dtype, outliers=outliers), group or k, pow2)
    for m, k, outliers in ((1, 128, False), (17, 384, True), (40, 256, False), (3, 333, True))
    for dtype in (torch.bfloat16, torch.float16)
    for group in GROUPS.values()
    for pow2 in (False, True)
]
# Rows that lie apart.
JOBS.append((activations(5, 512, torch.bfloat16)[:, 128:384], 128, False))


def by_kernel(jobs):
    from sglang_fp8rl.numerics.triton import linear

    return [linear.doubled(*job) for job in jobs]


def test_the_interpreter_gives_the_definition_s_bytes(tmp_path):
    results = interpreted(by_kernel, JOBS, tmp_path)
    for job, found in zip(JOBS, results, strict=True):
        expected = doubled(*job)
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), job[0].shape


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("outliers", [False, True])
def test_two_e4m3_numbers_hold_a_bf16_one(group, outliers, pow2):
    x = activations(64, 1024, torch.bfloat16, outliers=outliers)
    group = group or x.shape[1]
    both = doubled(x, group, pow2)
    q, scale = quantize_per_token_group(both, group, pow2_scale=pow2)
    held = q.double() * scale.double().repeat_interleave(group, 1)
    quantized = sqnr_db(x.double(), held[:64])
    assert sqnr_db(x.double(), held[:64] + held[64:]) > max(62, quantized + 20)


def by_blocks(x):
    """SGLang 0.5.23's `per_token_group_quant.cuh`: a product with 448 / amax."""
    amax = x.abs().amax(1, keepdim=True).clamp_min(1e-10)
    return (x * (448.0 / amax)).clamp(-448, 448).to(torch.float8_e4m3fn), amax * (1.0 / 448.0)


def by_rows(x):
    """SGLang 0.5.23's `per_token_quant_fp8.cuh`: a product with 1 / (amax / 448)."""
    scale = x.abs().amax(1, keepdim=True) / 448.0
    return (x * (1.0 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def by_division(x):
    scale = x.abs().amax(1, keepdim=True) / 448.0
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


# Mantissas, of 128, of largest numbers at which these take other codes of a tie; and one at which they don't.
@pytest.mark.parametrize("mantissa", [68, 76, 80, 120, 10, 24, 38, 1])
@pytest.mark.parametrize("quantize", [by_blocks, by_rows, by_division])
def test_whoever_quantizes_the_rows_again_finds_the_codes_that_the_rest_completes(
    quantize, mantissa
):
    generator = torch.Generator().manual_seed(mantissa)
    x = torch.randn(512, 128, generator=generator).clamp(-3.9, 3.9)
    x[:, 5] = 4.0 * (1 + mantissa / 128)
    x = x.to(torch.bfloat16)
    both = doubled(x, 128).float()
    (codes, scale), (rest, rest_scale) = quantize(both[:512]), quantize(both[512:])
    held = codes.double() * scale.double() + rest.double() * rest_scale.double()
    worst = (held - x.double()).abs() / x.double().abs().clamp_min(2**-6)
    assert worst.max() < 2**-7
    assert sqnr_db(x.double(), held) > 62


def test_the_operator_says_a_shape_without_running_and_can_be_traced():
    found = doubled(torch.empty(3, 256, dtype=torch.bfloat16, device="meta"), 128)
    assert (found.shape, found.dtype) == ((6, 256), torch.bfloat16)
    torch.library.opcheck(doubled, (activations(3, 256, torch.bfloat16), 128, False))


def test_no_row_is_doubled_to_no_row():
    assert doubled(torch.empty(0, 256, dtype=torch.bfloat16), 128).shape == (0, 256)


def test_a_nan_stays_one():
    x = activations(2, 256, torch.bfloat16)
    x[1, 200] = float("nan")
    both = doubled(x, 128)
    assert both[3, 200].isnan()
    assert not both[::2].isnan().any()


@pytest.mark.gpu
def test_hardware_gives_the_definition_s_bytes():
    for x, *options in JOBS:
        found = doubled(x.cuda(), *options).cpu()
        assert torch.equal(found.view(torch.int16), doubled(x, *options).view(torch.int16))


@pytest.mark.gpu
def test_a_captured_split_reads_the_rows_that_are_there_when_it_is_replayed():
    x = activations(40, 512, torch.bfloat16).cuda()
    doubled(x, 128)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = doubled(x, 128)
    x.copy_(x.flip(0))
    graph.replay()
    assert torch.equal(output, doubled(x, 128))
