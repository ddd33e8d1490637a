"""FP8 queries and probabilities on the CPU platform, against a formula of their own."""

from __future__ import annotations

import math

import pytest
import torch
from kv_cache.cpu_attention import fp8_attention
from support.numerics.oracle_fp8 import nearest_e4m3

FP8 = torch.float8_e4m3fn


def drawn(keys: int, queries: int, heads: int, kv_heads: int, size: int, scale: float = 1.0):
    draw = torch.Generator().manual_seed(keys)
    q = (torch.randn(queries, heads, size, generator=draw) * scale).bfloat16()
    k, v = (torch.randn(keys, kv_heads, size, generator=draw).to(FP8) for _ in range(2))
    return q, k, v


def causal(keys: int, queries: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def one_by_one(q, k, v, scaling, mask) -> torch.Tensor:
    """A query and a head at a time, in FP64, with e4m3 as a grid of numbers."""
    out = torch.empty(q.shape, dtype=torch.float64)
    share = q.shape[1] // k.shape[1]
    for token in range(q.shape[0]):
        seen = mask[token].nonzero().flatten()
        for head in range(q.shape[1]):
            key, value = k[seen, head // share].double(), v[seen, head // share].double()
            scores = [scaling * float(nearest_e4m3(q[token, head].double()) @ row) for row in key]
            exact = torch.tensor([256 * math.exp(s - max(scores)) for s in scores]).double()
            out[token, head] = (nearest_e4m3(exact) / exact.sum()) @ value
    return out


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 8), (17, 17, 4, 2, 16), (33, 1, 4, 4, 32), (20, 6, 6, 1, 64)]
)
def test_queries_and_probabilities_are_rounded_to_e4m3_and_the_sum_is_not(shape):
    q, k, v = drawn(*shape)
    mask, scaling = causal(*shape[:2]), shape[4] ** -0.5
    found = fp8_attention(q, k, v, scaling, mask)
    expected = one_by_one(q, k, v, scaling, mask)
    assert found.dtype == torch.bfloat16
    error = (found.double() - expected).norm() / expected.norm()
    assert error < 4e-3  # BF16, and probabilities beside a boundary
    plain = torch.softmax(
        torch.einsum(
            "qhd,khd->hqk", q.float(), k.float().repeat_interleave(shape[2] // shape[3], 1)
        )
        .mul(scaling)
        .masked_fill(~mask, -torch.inf),
        -1,
    )
    wide = v.float().repeat_interleave(shape[2] // shape[3], 1)
    in_bf16 = torch.einsum("hqk,khd->qhd", plain, wide)
    if shape[0] > 1:
        assert (
            in_bf16 - expected
        ).norm() / expected.norm() > 8e-3  # what it emulates is observable


def test_small_probabilities_are_kept_by_the_offset():
    """One key that takes nearly all, 128 that take 2**-10 each: without the offset they would be gone."""
    size = 16
    q = torch.zeros(1, 1, size, dtype=torch.bfloat16)
    q[0, 0, 0] = 1.0
    k, v = torch.zeros(129, 1, size).to(FP8), torch.zeros(129, 1, size)
    k[0, 0, 0] = torch.tensor(10 * math.log(2)).to(FP8)
    v[1:] = 1.0
    found = fp8_attention(q, k, v.to(FP8), 1.0, torch.ones(1, 129, dtype=torch.bool))
    small = 128 * math.exp(-float(k[0, 0, 0]))
    assert float(found[0, 0, 0]) == pytest.approx(small / (1 + small), rel=0.05)


def test_a_query_beyond_e4m3_is_not_hidden():
    q, k, v = drawn(4, 4, 1, 1, 8)
    q[2] = 1000.0
    found = fp8_attention(q, k, v, 1.0, causal(4, 4))
    saturated = q.clone()
    saturated[2] = 448.0
    assert found[2].isnan().all() or torch.equal(
        found, fp8_attention(saturated, k, v, 1.0, causal(4, 4))
    )
    assert found[3].isfinite().all()
