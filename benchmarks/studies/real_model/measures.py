"""What two lists of log-probabilities of the same tokens say, with confidence intervals.

Tokens of one answer are not independent, answers are: intervals are percentiles over resamples of whole
answers. Every arm gets the same resamples, so the interval of a ratio or a difference of two arms is
paired: what makes an answer hard for all of them cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.lab.eval.stats import Estimate

RESAMPLES = 4000
QUANTILES = (0.5, 0.9, 0.99, 0.999)
POSITIONS = (0, 4, 8, 16, 32, 64, 128, 256)  # where bins of an answer's tokens begin
TIS_CAP = 2.0


class Resamples:
    """How often each of `clusters` answers counts in each resample; the same for every arm."""

    def __init__(self, clusters: int, seed: int = 0, count: int = RESAMPLES) -> None:
        if clusters < 2:
            raise ConfigError(
                "resamples", f"{clusters} answers", "an interval needs two at least", "Take more."
            )
        draw = np.random.default_rng(seed)
        self.weights = draw.multinomial(clusters, [1 / clusters] * clusters, size=count)

    def ratio(self, numerator: np.ndarray, denominator: np.ndarray) -> Estimate:
        """Sum over sum, both with one value per answer; the 95 % interval."""
        low, high = np.percentile(
            (self.weights @ numerator) / (self.weights @ denominator), (2.5, 97.5)
        )
        return Estimate(float(numerator.sum() / denominator.sum()), float(low), float(high))


@dataclass(frozen=True)
class Gap:
    """Per-token gaps of an arm: `log_ratio` is trainer less rollout, a row per answer."""

    log_ratio: list[np.ndarray]

    @property
    def flat(self) -> np.ndarray:
        return np.concatenate(self.log_ratio)

    def sums(self, function: Any) -> np.ndarray:
        """One sum of `function(log_ratio)` per answer."""
        return np.array([function(row).sum() for row in self.log_ratio])

    @property
    def counts(self) -> np.ndarray:
        return np.array([len(row) for row in self.log_ratio], dtype=float)


def k3(log_ratio: np.ndarray) -> np.ndarray:
    """`ratio - 1 - log ratio`, never negative; its mean estimates KL(rollout || trainer)."""
    return np.expm1(log_ratio) - log_ratio


def multiplicative(log_ratio: np.ndarray) -> np.ndarray:
    """exp(|log ratio|): 1 where both agree (NeMo-RL's token_mult_prob_error)."""
    return np.exp(np.abs(log_ratio))


def gap(rollout: Sequence[torch.Tensor], trainer: Sequence[torch.Tensor]) -> Gap:
    """Rows of (tokens,) log-probabilities of the same answers, less each other in FP64.

    Raises:
        ConfigError: they are not of the same tokens.
    """
    sizes = [[len(row) for row in side] for side in (rollout, trainer)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            "answers",
            f"{sum(sizes[0])} tokens against {sum(sizes[1])}",
            "both sides score the same tokens",
            "Delete what was kept of this run (--fresh).",
        )
    pairs = zip(rollout, trainer, strict=True)
    return Gap([(t.double() - r.double()).numpy() for r, t in pairs])


def means(own: Gap, resamples: Resamples) -> dict[str, Any]:
    """Mean k3 and multiplicative error of one arm, with their intervals."""
    return {
        "kl_k3": asdict(resamples.ratio(own.sums(k3), own.counts)),
        "mult_prob_error": asdict(resamples.ratio(own.sums(multiplicative), own.counts)),
    }


def summarize(own: Gap, resamples: Resamples) -> dict[str, Any]:
    """Mean, tail and positions of one arm's gap, as plain values."""
    flat = own.flat
    size = np.abs(flat)
    row, token = _worst(own)
    weights = np.exp(flat)
    return {
        "answers": len(own.log_ratio),
        "tokens": len(flat),
        **means(own, resamples),
        "abs_log_ratio": asdict(resamples.ratio(own.sums(np.abs), own.counts)),
        "log_ratio_mean": float(flat.mean()),
        "quantiles": {str(q): float(np.quantile(size, q)) for q in QUANTILES},
        "worst": {"abs_log_ratio": float(size.max()), "answer": row, "token": token},
        "above_tis_cap": float((weights > TIS_CAP).mean()),
        "token_ess": float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
        "answer_log_ratio_std": float(own.sums(lambda row: row).std()),
        "by_position": by_position(own),
    }


def by_position(own: Gap) -> list[dict[str, float]]:
    """Mean k3 and multiplicative error of the tokens that come n-th in their answer, in bins."""
    where = np.concatenate([np.arange(len(row)) for row in own.log_ratio])
    flat = own.flat
    found = []
    for begin, end in zip(POSITIONS, (*POSITIONS[1:], None), strict=True):
        inside = (where >= begin) & (where < (end or np.inf))
        if inside.any():
            found.append(
                {
                    "from": begin,
                    "tokens": int(inside.sum()),
                    "kl_k3": float(k3(flat[inside]).mean()),
                    "mult_prob_error": float(multiplicative(flat[inside]).mean()),
                }
            )
    return found


def against(own: Gap, other: Gap, resamples: Resamples) -> dict[str, Any]:
    """An arm's mean k3 and multiplicative error over another's, paired."""
    if [len(row) for row in own.log_ratio] != [len(row) for row in other.log_ratio]:
        raise ConfigError(
            "a paired comparison", "other answers", "both arms score the same tokens", ""
        )
    excess = [gap.sums(multiplicative) - gap.counts for gap in (own, other)]
    return {
        "kl_k3": asdict(resamples.ratio(own.sums(k3), other.sums(k3))),
        "mult_prob_error_less_one": asdict(resamples.ratio(*excess)),
    }


def perplexity(logprobs: Sequence[torch.Tensor], resamples: Resamples) -> dict[str, float]:
    """exp of the mean negative log-probability over all tokens of all windows."""
    losses = np.array([-row.double().sum().item() for row in logprobs])
    counts = np.array([len(row) for row in logprobs], dtype=float)
    mean = resamples.ratio(losses, counts)
    return {name: float(np.exp(value)) for name, value in asdict(mean).items()}


def perplexity_ratio(
    own: Sequence[torch.Tensor], other: Sequence[torch.Tensor], resamples: Resamples
) -> dict[str, float]:
    """An arm's perplexity over another's on the same windows, paired."""
    difference = gap(own, other)  # other less own
    mean = resamples.ratio(difference.sums(lambda row: row), difference.counts)
    return {name: float(np.exp(value)) for name, value in asdict(mean).items()}


def _worst(own: Gap) -> tuple[int, int]:
    largest = [float(np.abs(row).max()) if len(row) else -1.0 for row in own.log_ratio]
    answer = int(np.argmax(largest))
    return answer, int(np.argmax(np.abs(own.log_ratio[answer])))
