"""Estimates over a few problems with n samples each, and the comparison of two such runs.

Two questions, two sources of chance. *How good is the model?* The problems are a draw from all that could
have been asked: intervals are clustered by problem. *Is FP8 as good as its baseline here?* Both arms answer
the same problems, so only the sampling is chance: the test permutes responses between the arms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...errors import ConfigError

Verdict = Literal["worse", "within noise", "better"]


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Candidate against baseline on the same problems.

    Attributes:
        difference: candidate's avg@n less the baseline's, with the interval on *these* problems.
        p_value: two-sided, exact; up to `alpha` the verdict is not "within noise".
        detectable: the true difference that a run of this size finds in four of five cases: within
            noise never means "no difference", it means "less than about this".
    """

    difference: Estimate
    p_value: float
    alpha: float
    detectable: float
    verdict: Verdict
    test: str = "exact permutation of responses between the arms within each problem, two-sided"


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Probability that one of k responses drawn from `samples` without replacement is correct.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374): 1 - C(n - c, k) / C(n, k).
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ConfigError(
            "pass@k",
            f"k={k}, {correct} correct of {samples}",
            "1 <= k <= samples and 0 <= correct <= samples",
            "Take more samples, or ask for a smaller k.",
        )
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def estimate_mean(values: Sequence[float], samples: int, confidence: float = 0.95) -> Estimate:
    """Mean of per-problem values in [0, 1], with an interval clustered by problem.

    Korn and Graubard's: the Clopper-Pearson interval at the *effective* sample size, that is, at the
    number of independent responses which would have the variance seen between problems. Unlike a
    bootstrap over problems it stays honest for few problems, and when all of them agree.

    Args:
        values: one value per problem (share correct, pass@k).
        samples: responses in all, the most that the effective size can be.
    """
    import numpy as np
    from scipy import stats

    clusters, tail = len(values), (1 - confidence) / 2
    mean = float(np.mean(values))
    effective = float(clusters)  # where all problems agree each counts once, whatever n
    if min(values) < max(values):
        variance = float(np.var(values)) / (clusters - 1)
        few = stats.t.ppf(1 - tail, samples - 1) / stats.t.ppf(1 - tail, clusters - 1)
        effective = min(mean * (1 - mean) / variance * few**2, float(samples))
    hits = mean * effective
    low = stats.beta.ppf(tail, hits, effective - hits + 1) if mean > 0 else 0.0
    high = stats.beta.ppf(1 - tail, hits + 1, effective - hits) if mean < 1 else 1.0
    return Estimate(mean, float(low), float(high))


def compare_paired(
    candidate: Sequence[int], baseline: Sequence[int], samples: int, alpha: float = 0.05
) -> Comparison:
    """Compare correct counts per problem, `samples` responses each, paired by problem.

    If both arms answer a problem equally well, each split of its correct responses between them is
    as likely as drawing without replacement makes it (hypergeometric). The sum over problems has an
    exact distribution, the convolution; p is the weight of sums at least as far from its middle as
    the one seen. For n = 1 this is McNemar's exact test, for one problem Fisher's.

    The interval of the difference has the variance of those splits, which is the sampling's for every n,
    or Agresti and Caffo's if that is more: never of zero width.
    """
    if len(candidate) != len(baseline) or not candidate:
        raise ConfigError(
            "comparison",
            f"{len(candidate)} and {len(baseline)} problems",
            "both arms answer the same problems",
            "Run both arms on one data set.",
        )
    import numpy as np
    from scipy import stats

    counts = np.array([candidate, baseline])  # [2, problems]
    ours, theirs = counts.sum(axis=1)
    outcomes = np.ones(1)
    for correct in counts.sum(axis=0):
        split = stats.hypergeom.pmf(np.arange(samples + 1), 2 * samples, correct, samples)
        outcomes = np.convolve(outcomes, split)
    off_middle = np.abs(np.arange(outcomes.size) - (ours + theirs) / 2)
    as_far = off_middle >= abs(ours - theirs) / 2 - 1e-9
    p_value = min(1.0, float(outcomes[as_far].sum()))

    problems = len(candidate)
    difference = float(ours - theirs) / (samples * problems)
    shares = (counts + 1) / (samples + 2)
    pooled = counts.mean(axis=0) / samples
    of_splits = 4 * (pooled * (1 - pooled)).sum() / (2 * samples - 1)
    error = math.sqrt(max(of_splits, (shares * (1 - shares)).sum() / (samples + 2))) / problems
    reach = float(stats.norm.ppf(1 - alpha / 2))
    verdict: Verdict = "within noise"
    if p_value <= alpha:
        verdict = "better" if difference > 0 else "worse"
    return Comparison(
        difference=Estimate(
            difference, max(-1.0, difference - reach * error), min(1.0, difference + reach * error)
        ),
        p_value=p_value,
        alpha=alpha,
        detectable=min(1.0, (reach + float(stats.norm.ppf(0.8))) * error),
        verdict=verdict,
    )
