"""Powers of two are exact where they are said to be, and nowhere else."""

import math

import pytest
import torch
from support.numerics.numerics_cases import bits, same_bits

from sglang_fp8rl.numerics.kv_bounds import (
    exact_range,
    magnitudes,
    multiply_by_powers,
    smallest_exponent,
)

TINY, HUGE = 2.0**-126, (2 - 2.0**-7) * 2.0**127
CASES = {
    "ordinary": [1.0, -0.5, 3.25, 0.0, -0.0],
    "zeros": [0.0, -0.0],
    "smallest normal": [TINY, 1.0],
    "subnormal": [TINY / 64, 1.0],
    "largest": [HUGE, -1.0],
    "smallest alone": [TINY],
    "largest alone": [HUGE],
    "all of them": [TINY / 4, TINY, 0.0, 1.5, HUGE],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_there_and_back_is_the_identity_over_the_whole_range_and_not_beyond(name, dtype):
    values = torch.tensor(CASES[name], dtype=dtype)
    values = torch.cat([values, -values])
    low, high = exact_range(*magnitudes([values]).tolist())
    assert low <= 0 <= high
    for exponent in {low, -1, 0, 1, high}:
        moved = values.clone()
        multiply_by_powers([moved], [exponent])
        is_inside = low <= exponent <= high
        finite = bool(moved.isfinite().all())
        multiply_by_powers([moved], [-exponent])
        assert (same_bits(moved, values) and finite) or not is_inside
    for beyond in (low - 1, high + 1):
        if abs(beyond) > 126:
            continue
        # One binade more leaves the normal numbers, so a kernel that flushes them would see zero.
        moved = values.double() * 2.0**beyond
        nonzero = moved[moved != 0].abs()
        assert float(nonzero.min()) < TINY or float(nonzero.max()) >= 2.0**128


def test_every_bf16_number_in_range_moves_without_losing_a_bit():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for exponent in (-17, -1, 1, 23):
        least, most = math.ldexp(TINY, max(-exponent, 0)), math.ldexp(HUGE, -max(exponent, 0))
        chosen = every[(every == 0) | ((every.abs() >= least) & (every.abs() <= most))]
        low, high = exact_range(*magnitudes([chosen]).tolist())
        assert low <= exponent <= high
        moved = chosen.clone()
        multiply_by_powers([moved], [exponent])
        assert torch.equal(moved.double(), chosen.double() * 2.0**exponent)
        multiply_by_powers([moved], [-exponent])
        assert torch.equal(bits(moved), bits(chosen))


def test_views_are_multiplied_and_nothing_beside_them():
    held = torch.ones(6, 4)
    multiply_by_powers([held[1:3], held[4:, 1:2]], [3, -2])
    assert held[1:3].eq(8).all()
    assert held[4:, 1:2].eq(0.25).all()
    assert held.eq(1).sum() == 24 - 8 - 2


def test_what_is_not_finite_does_not_move():
    assert exact_range(math.nan, math.nan) == (0, 0)
    assert exact_range(1.0, math.inf) == (0, 0)
    assert magnitudes([torch.tensor([1.0, math.nan])]).isnan().any()
    assert exact_range(*magnitudes([torch.zeros(3)]).tolist()) == (-126, 126)


@pytest.mark.parametrize("limit", [448.0, 57344.0])
def test_the_exponent_is_the_smallest_that_keeps_the_bound_at_or_below_the_limit(limit):
    edge = [math.ldexp(limit, n) for n in (-40, -3, 0, 1, 12)]
    values = [math.nextafter(x, way) for x in edge for way in (0, math.inf)] + edge
    for bound in [*values, 1e-30, 0.3, 7.0, 1e30]:
        exponent = smallest_exponent(bound, limit)
        assert bound <= math.ldexp(limit, exponent)
        assert bound > math.ldexp(limit, exponent - 1)
