"""Importance weights that correct a loss for the gap between rollout engine and trainer.

The rollout engine samples from `pi_rollout` (FP8, other kernels), the gradient wants `pi_trainer`.
Each token's loss is therefore multiplied by `pi_trainer / pi_rollout`, aggregated per `level` and
kept from exploding in one of two ways: *truncated* (TIS: everything above a cap becomes the cap) or
*masked* (MIS: everything outside a band becomes 0).

Sources: TIS, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training" (token level; after Ionides 2008); MIS and sequence levels, Liu et al. 2025, "When Speed
Kills Stability"; masking per token is IcePop's. veRL has the same under `rollout_is` and
`rollout_rs`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from .metrics import (
    EXPONENT_BOUND,
    MismatchInputError,
    checked_log_ratio,
    checked_mask,
)

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class WeightSummary:
    """What a batch of weights does to the loss.

    Attributes:
        mean, std, max: of the weights at response tokens.
        zero_fraction: response tokens whose weight is 0, which therefore train nothing.
        effective_sample_size: see `effective_sample_size`.
    """

    mean: float
    std: float
    max: float
    zero_fraction: float
    effective_sample_size: float


def importance_weights(
    rollout_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: Level = "token",
) -> torch.Tensor:
    """Return `pi_trainer / pi_rollout`, neither truncated nor masked.

    Args:
        rollout_logprobs, trainer_logprobs: (batch, seq) log-probabilities of the sampled tokens.
        mask: (batch, seq), 1 or True at response tokens.
        level: `token`: each token's own ratio (biased, low variance). `sequence`: the product
            over the row's response tokens (unbiased, high variance). `geometric`: that product to
            the power 1/length, which does not grow with the length.

    Returns:
        (batch, seq), FP32 or wider, detached; the row's weight at each of its response tokens for
        the sequence levels; 0 outside the mask. Exponents are clamped to ±`EXPONENT_BOUND`.

    Raises:
        MismatchInputError: unknown level, or bad tensors (see `metrics.checked_log_ratio`).
    """
    if level not in get_args(Level):
        raise MismatchInputError(
            "level", repr(level), f"levels are {', '.join(get_args(Level))}", "Choose one of them."
        )
    with torch.no_grad():
        log_ratio, keep = checked_log_ratio(rollout_logprobs, trainer_logprobs, mask)
        if level != "token":
            log_ratio = log_ratio.sum(dim=-1, keepdim=True)  # (batch, 1)
        if level == "geometric":
            log_ratio = log_ratio / keep.sum(dim=-1, keepdim=True).clamp(min=1)
        weights = log_ratio.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp().expand(keep.shape)
        return torch.where(keep, weights, torch.zeros_like(weights))


def truncated_importance_weights(
    rollout_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    cap: float = 2.0,
    level: Level = "token",
) -> torch.Tensor:
    """TIS: `min(ratio, cap)`. Arguments, result and errors as in `importance_weights`.

    Equals veRL's `rollout_is=<level>`, `rollout_is_threshold=cap` bit for bit in FP32. Unlike
    there, padding that holds NaN gets weight 0, and sums over BF16 input run in FP32.
    """
    if not (math.isfinite(cap) and cap > 0):
        raise MismatchInputError(
            "cap", str(cap), "the cap is a positive finite number", "2 is the published value."
        )
    weights = importance_weights(rollout_logprobs, trainer_logprobs, mask, level=level)
    return weights.clamp(max=cap)


def masked_importance_weights(
    rollout_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
    level: Level = "token",
) -> torch.Tensor:
    """MIS: the ratio inside [low, high], 0 outside. Otherwise as `importance_weights`.

    Equals veRL's `rollout_is=<level>`, `rollout_is_threshold="<low>_<high>"` bit for bit in FP32
    (veRL has no geometric level there).
    """
    _check_band(low, high)
    weights = importance_weights(rollout_logprobs, trainer_logprobs, mask, level=level)
    inside = (weights >= low) & (weights <= high)
    return torch.where(inside, weights, torch.zeros_like(weights))


def acceptance_mask(
    rollout_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
    level: Level = "geometric",
) -> torch.Tensor:
    """Return the bool mask (batch, seq) without the tokens or rows whose ratio is outside the band.

    For rejection on one level together with weights on another (geometric rejection with token
    TIS is common). veRL's `token_k1`, `seq_sum_k1` and `seq_mean_k1` do the same, but bound the
    *inverse* ratio: its `"<a>_<b>"` is `low=1/b, high=1/a` here.
    """
    _check_band(low, high)
    weights = importance_weights(rollout_logprobs, trainer_logprobs, mask, level=level)
    return mask.bool() & (weights >= low) & (weights <= high)


def effective_sample_size(weights: torch.Tensor, mask: torch.Tensor) -> float:
    """Kish's effective sample size as a fraction of the response tokens, in [0, 1].

    `(sum w)**2 / (n * sum w**2)`: 1 for equal weights, 1/n when one token carries everything, 0
    when every weight is 0 (veRL divides by zero there).

    Raises:
        MismatchInputError: shapes differ, or the mask is empty or not 0 and 1.
    """
    used = _checked_weights(weights, mask)
    squares = used.square().sum().item()
    return used.sum().item() ** 2 / (used.numel() * squares) if squares > 0 else 0.0


def summarize_weights(weights: torch.Tensor, mask: torch.Tensor) -> WeightSummary:
    """Summarize (batch, seq) weights over the response tokens; errors as `effective_sample_size`."""
    used = _checked_weights(weights, mask)
    return WeightSummary(
        mean=used.mean().item(),
        std=used.std(correction=0).item(),
        max=used.max().item(),
        zero_fraction=(used == 0).double().mean().item(),
        effective_sample_size=effective_sample_size(weights, mask),
    )


def _checked_weights(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the weights under the mask as (tokens,) FP64."""
    if weights.shape != mask.shape:
        raise MismatchInputError(
            "weights",
            f"shape {tuple(weights.shape)} against a mask of {tuple(mask.shape)}",
            "there is one weight for each token of the mask",
            "Pass the mask that the weights were computed with.",
        )
    used = weights[checked_mask(mask)].double()
    # Written so that NaN counts as bad.
    if not bool(((used >= 0) & (used < torch.inf)).all()):
        raise MismatchInputError(
            "weights",
            f"values between {used.min().item()} and {used.max().item()}",
            "importance weights are finite and not negative",
            "Pass weights, not log-weights.",
        )
    return used


def _check_band(low: float, high: float) -> None:
    if not (0 < low <= high < math.inf):
        raise MismatchInputError(
            "low, high",
            f"[{low}, {high}]",
            "the band satisfies 0 < low <= high < inf",
            "[0.5, 2] keeps ratios within a factor of two.",
        )
