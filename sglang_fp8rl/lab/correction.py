"""Importance weights that correct a loss for the gap between rollout engine and trainer.

The rollout engine samples from `pi_rollout` (FP8, other kernels), the gradient wants `pi_trainer`.
Each token's loss is therefore multiplied by `pi_trainer / pi_rollout`, aggregated per `level` and
kept from exploding in one of two ways: *truncated* (TIS: everything above a cap becomes the cap) or
*masked* (MIS: everything outside a band becomes 0, so what is not 0 is also what rejection keeps).

Sources: TIS, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training" (token level; after Ionides 2008); MIS and sequence levels, Liu et al. 2025, "When Speed
Kills Stability"; masking per token is IcePop's. veRL has the same under `rollout_is` and
`rollout_rs`, whose bands are of the inverse ratio: its `"<a>_<b>"` is `low=1/b, high=1/a` here.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from .metrics import EXPONENT_BOUND, MismatchInputError, checked_log_ratio

Level = Literal["token", "sequence", "geometric"]


def importance_weights(
    rollout_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: Level = "token",
    cap: float | None = None,
    band: tuple[float, float] | None = None,
) -> torch.Tensor:
    """Return `pi_trainer / pi_rollout`.

    Args:
        level: `token`: each token's own ratio (biased, low variance). `sequence`: the product
            over the row's response tokens (unbiased, high variance). `geometric`: that product to
            the power 1/length, which does not grow with the length.
        cap: TIS: `min(ratio, cap)`; 2 is the published value. Equals veRL's `rollout_is=<level>`,
            `rollout_is_threshold=cap` bit for bit in FP32; unlike there, padding that holds NaN gets
            weight 0, and sums over BF16 input run in FP32.
        band: MIS: 0 for a ratio outside of (low, high), such as (0.5, 2). Equals veRL's
            `rollout_is_threshold="<low>_<high>"` bit for bit (it has no geometric level there).

    Returns:
        (batch, seq), FP32 or wider, detached; the row's weight at each of its response tokens for
        the sequence levels; 0 outside the mask. Exponents are clamped to ±`EXPONENT_BOUND`.

    Raises:
        MismatchInputError: an unknown level, a cap or band that is none, or bad tensors (see
            `metrics.checked_log_ratio`).
    """
    low, high = band or (math.nan, math.nan)
    for name, value, is_good, rule in (
        ("level", level, level in get_args(Level), f"levels are {', '.join(get_args(Level))}"),
        ("cap", cap, cap is None or 0 < cap < math.inf, "the cap is a positive finite number"),
        ("band", band, band is None or 0 < low <= high < math.inf, "0 < low <= high < inf"),
    ):
        if not is_good:
            raise MismatchInputError(name, repr(value), rule, "Choose another value.")
    with torch.no_grad():
        log_ratio, keep = checked_log_ratio(rollout_logprobs, trainer_logprobs, mask)
        if level != "token":
            log_ratio = log_ratio.sum(dim=-1, keepdim=True)  # (batch, 1)
        if level == "geometric":
            log_ratio = log_ratio / keep.sum(dim=-1, keepdim=True).clamp(min=1)
        weights = log_ratio.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp().expand(keep.shape)
        if band is not None:
            keep = keep & (weights >= low) & (weights <= high)
        weights = torch.where(keep, weights, torch.zeros_like(weights))
        return weights if cap is None else weights.clamp(max=cap)
