"""Estimates and tests: against enumeration, against SciPy's own tests, and by simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.lab.eval.stats import compare_paired, estimate_mean, pass_at_k


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_equals_enumeration(samples):
    for correct in range(samples + 1):
        outcomes = [1] * correct + [0] * (samples - correct)
        for k in range(1, samples + 1):
            draws = [any(draw) for draw in itertools.combinations(outcomes, k)]
            assert pass_at_k(correct, samples, k) == pytest.approx(sum(draws) / len(draws))


def test_pass_at_k_is_unbiased():
    generator = np.random.default_rng(0)
    counts = generator.binomial(8, 0.2, size=20_000)
    mean = np.mean([pass_at_k(int(count), 8, 4) for count in counts])
    assert mean == pytest.approx(1 - 0.8**4, abs=0.01)


@pytest.mark.parametrize(("correct", "samples", "k"), [(1, 2, 3), (1, 2, 0), (3, 2, 1), (-1, 2, 1)])
def test_impossible_counts_are_refused(correct, samples, k):
    with pytest.raises(ConfigError, match=r"pass@k"):
        pass_at_k(correct, samples, k)


def test_interval_of_single_samples_is_clopper_pearson_at_one_less():
    # With one sample per problem the variance between problems is that of n - 1 coin tosses.
    values = [1.0] * 7 + [0.0] * 13
    found = estimate_mean(values, samples=20)
    exact = stats.beta.ppf([0.025, 0.975], [0.35 * 19, 0.35 * 19 + 1], [0.65 * 19 + 1, 0.65 * 19])
    assert (found.low, found.high) == pytest.approx(tuple(exact))


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_agreement_of_few_problems_is_not_certainty(value):
    found = estimate_mean([value] * 3, samples=48)
    assert found.value == value
    assert 0 <= found.low <= value <= found.high <= 1
    assert found.high - found.low > 0.5


def test_agreement_on_no_round_number_is_not_certainty_either():
    found = estimate_mean([0.1] * 3, samples=30)  # their mean in FP64 is another number than 0.1
    assert found.high - found.low > 0.5


@pytest.mark.parametrize("problems", [3, 10, 30])
@pytest.mark.parametrize("shape", [0.3, 2.0])
def test_intervals_cover_the_truth(problems, shape):
    """Difficulties drawn from Beta(shape, 2 * shape): U-shaped as AIME's are, or all alike."""
    generator = np.random.default_rng(problems)
    truth, samples, trials = 1 / 3, 8, 400
    inside = 0
    for _ in range(trials):
        counts = generator.binomial(samples, generator.beta(shape, 2 * shape, size=problems))
        found = estimate_mean(list(counts / samples), samples * problems)
        inside += found.low <= truth <= found.high
    assert inside / trials >= 0.93


def test_one_problem_is_fishers_exact_test():
    for ours, theirs in [(0, 8), (3, 7), (5, 6), (8, 2)]:
        found = compare_paired([ours], [theirs], 8)
        table = [[ours, 8 - ours], [theirs, 8 - theirs]]
        assert found.p_value == pytest.approx(stats.fisher_exact(table).pvalue)


def test_one_sample_is_mcnemars_exact_test():
    ours = [1, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    theirs = [0, 1, 1, 1, 1, 1, 1, 0, 1, 1]
    found = compare_paired(ours, theirs, 1)
    assert found.p_value == pytest.approx(stats.binomtest(1, 7).pvalue)


def test_several_problems_equal_enumeration_of_all_splits():
    ours, theirs, samples = [0, 2], [2, 3], 3
    middle = (sum(ours) + sum(theirs)) / 2
    pools = [[1] * (a + b) + [0] * (2 * samples - a - b) for a, b in zip(ours, theirs, strict=True)]
    sums = [
        sum(first) + sum(second)
        for first in itertools.combinations(pools[0], samples)
        for second in itertools.combinations(pools[1], samples)
    ]
    expected = np.mean([abs(s - middle) >= abs(sum(ours) - middle) for s in sums])
    assert compare_paired(ours, theirs, samples).p_value == pytest.approx(expected)


def test_equal_arms_are_within_noise_and_the_interval_has_a_width():
    for counts in ([8] * 3, [0] * 3, [4, 8, 0]):
        found = compare_paired(counts, counts, 8)
        assert (found.p_value, found.verdict) == (pytest.approx(1), "within noise")
        assert found.difference.low < 0 == found.difference.value < found.difference.high


def test_a_collapse_on_three_problems_is_seen():
    found = compare_paired([0, 0, 1], [16, 14, 16], 16)
    assert found.verdict == "worse"
    assert found.p_value < 1e-9


def test_swapping_the_arms_swaps_the_verdict():
    one, other = compare_paired([9, 3], [15, 14], 16), compare_paired([15, 14], [9, 3], 16)
    assert (one.verdict, other.verdict) == ("worse", "better")
    assert one.p_value == pytest.approx(other.p_value)
    assert one.difference.low == pytest.approx(-other.difference.high)


def simulate(shape: float, samples: int, shift: float, trials: int = 400):
    generator = np.random.default_rng(5)
    for _ in range(trials):
        base = generator.beta(shape, 1.5 * shape, size=30)
        ours = generator.binomial(samples, np.clip(base + shift, 0, 1))
        theirs = generator.binomial(samples, base)
        true = np.mean(np.clip(base + shift, 0, 1) - base)
        yield true, compare_paired(ours.tolist(), theirs.tolist(), samples)


@pytest.mark.parametrize("samples", [1, 16])
@pytest.mark.parametrize("shape", [0.4, 100.0])  # U-shaped, or all problems alike
def test_false_alarms_stay_below_alpha_and_intervals_cover(shape, samples):
    found = list(simulate(shape, samples, 0.0))
    assert np.mean([c.verdict != "within noise" for _, c in found]) <= 0.05
    found += simulate(shape, samples, 0.2)
    assert np.mean([c.difference.low <= true <= c.difference.high for true, c in found]) >= 0.93


@pytest.mark.parametrize("samples", [2, 16])
def test_the_interval_says_what_the_test_says(samples):
    found = [c for shift in (0.0, 0.2) for _, c in simulate(2.0, samples, shift)]
    noise = [c.verdict == "within noise" for c in found]
    assert (
        np.mean(
            [
                n == (c.difference.low <= 0 <= c.difference.high)
                for n, c in zip(noise, found, strict=True)
            ]
        )
        > 0.9
    )


def test_the_detectable_difference_is_found_four_times_in_five():
    size = compare_paired([8] * 30, [8] * 30, 16).detectable
    generator = np.random.default_rng(6)
    found = [
        compare_paired(
            generator.binomial(16, 0.5 - size / 2, size=30).tolist(),
            generator.binomial(16, 0.5 + size / 2, size=30).tolist(),
            16,
        ).verdict
        for _ in range(300)
    ]
    assert 0.72 <= np.mean([verdict == "worse" for verdict in found]) <= 0.9


def test_arms_of_unequal_size_are_refused():
    with pytest.raises(ConfigError, match="same problems"):
        compare_paired([1, 2], [1], 4)
    with pytest.raises(ConfigError, match="same problems"):
        compare_paired([], [], 4)
