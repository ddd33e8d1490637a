"""How far the rollout engine's log-probabilities are from the trainer's.

Every function takes `(batch, seq)` log-probabilities of the *sampled* tokens and a mask, 1 or True at
response tokens. `log_ratio = trainer - rollout`, so `ratio = pi_trainer / pi_rollout`, as in veRL's
`rollout_corr_helper`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from ..errors import Fp8RlError

# exp() is taken of log-ratios clamped to this range, as veRL does (`SAFETY_BOUND`): e^20 = 4.9e8
# is far beyond any ratio that training survives, and its square still fits FP32.
EXPONENT_BOUND = 20.0

_LOGPROB_ROUNDING = 1e-2  # above 0: of a log-softmax in low precision


class MismatchInputError(Fp8RlError):
    """Log-probabilities and masks that don't belong together, or hold no usable value."""


@dataclass(frozen=True)
class MismatchMetrics:
    """The gap over all response tokens of a batch; `as_dict()` gives plain numbers for a logger.

    Attributes:
        tokens: response tokens counted.
        sequences: rows with at least one of them.
        kl_k1: mean of `rollout - trainer`: KL(rollout || trainer), unbiased, may be negative.
        kl_k3: mean of `ratio - 1 - log_ratio`: same expectation, never negative
            (Schulman 2020, "Approximating KL divergence").
        ratio_mean, ratio_max, ratio_min: of pi_trainer / pi_rollout.
        chi2: mean of `ratio**2` less 1: the variance that importance weights would have.
        rollout_ppl, trainer_ppl: mean over sequences of exp(-mean log-probability).
        log_ppl_gap: mean over sequences of log(trainer_ppl / rollout_ppl).
        log_ppl_gap_abs: the same with absolute values, so that sequences don't cancel.
        mult_prob_error: mean of exp(|log_ratio|); 1 means equal (NeMo-RL's
            `token_mult_prob_error`).
        logprob_diff_mean, logprob_diff_max: of |log_ratio|, never clamped.
        prob_diff_mean, prob_diff_max: of |pi_trainer - pi_rollout|.
        prob_pearson: correlation of the two probabilities (MiniMax-M1, arXiv 2506.13585); NaN
            where either is constant.
        clamped_tokens: tokens whose |log_ratio| was beyond `EXPONENT_BOUND`; where this is not
            0, the means of ratios above are lower bounds.
    """

    tokens: int
    sequences: int
    kl_k1: float
    kl_k3: float
    ratio_mean: float
    ratio_max: float
    ratio_min: float
    chi2: float
    rollout_ppl: float
    trainer_ppl: float
    log_ppl_gap: float
    log_ppl_gap_abs: float
    mult_prob_error: float
    logprob_diff_mean: float
    logprob_diff_max: float
    prob_diff_mean: float
    prob_diff_max: float
    prob_pearson: float
    clamped_tokens: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def mismatch_metrics(
    rollout_logprobs: torch.Tensor, trainer_logprobs: torch.Tensor, mask: torch.Tensor
) -> MismatchMetrics:
    """Compare what the serving engine reported when it sampled with what the trainer computes.

    Differences from veRL 0.9.1 (`compute_offpolicy_metrics`): exponents are clamped in *every*
    formula (veRL's `k3_kl` overflows to inf at a log-ratio of 89); rows without a response token
    are left out (veRL counts each as a perplexity of 1); all of it is in FP64. Whatever stands outside
    the mask (NaN, inf, padding values) is never read.

    Raises:
        MismatchInputError: shapes differ or are not (batch, seq); a mask that selects nothing, or is
            not 0 and 1; a log-probability under it that is NaN, infinite or above 0.
    """
    mask = _checked_mask(rollout_logprobs, trainer_logprobs, mask)
    trainer, rollout = trainer_logprobs[mask].double(), rollout_logprobs[mask].double()  # (tokens,)
    delta = trainer - rollout
    safe = delta.clamp(-EXPONENT_BOUND, EXPONENT_BOUND)
    ratio = safe.exp()
    rollout_nll = -_sequence_means(rollout_logprobs, mask)  # (sequences,)
    trainer_nll = -_sequence_means(trainer_logprobs, mask)
    ppl_gap = trainer_nll - rollout_nll
    trainer_prob, rollout_prob = trainer.exp(), rollout.exp()
    prob_diff = (trainer_prob - rollout_prob).abs()
    return MismatchMetrics(
        tokens=delta.numel(),
        sequences=ppl_gap.numel(),
        kl_k1=-delta.mean().item(),
        kl_k3=(safe.expm1() - safe).mean().item(),
        ratio_mean=ratio.mean().item(),
        ratio_max=ratio.max().item(),
        ratio_min=ratio.min().item(),
        chi2=ratio.square().mean().item() - 1.0,
        rollout_ppl=rollout_nll.exp().mean().item(),
        trainer_ppl=trainer_nll.exp().mean().item(),
        log_ppl_gap=ppl_gap.mean().item(),
        log_ppl_gap_abs=ppl_gap.abs().mean().item(),
        mult_prob_error=safe.abs().exp().mean().item(),
        logprob_diff_mean=delta.abs().mean().item(),
        logprob_diff_max=delta.abs().max().item(),
        prob_diff_mean=prob_diff.mean().item(),
        prob_diff_max=prob_diff.max().item(),
        prob_pearson=_pearson(trainer_prob, rollout_prob),
        clamped_tokens=int((delta.abs() > EXPONENT_BOUND).sum().item()),
    )


def _checked_mask(
    rollout_logprobs: torch.Tensor, trainer_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The mask as bool, of log-probabilities that belong to it."""
    named = {"rollout_logprobs": rollout_logprobs, "trainer_logprobs": trainer_logprobs}
    for name, tensor in named.items():
        if tensor.shape != mask.shape:
            raise MismatchInputError(
                name,
                f"shape {tuple(tensor.shape)} against a mask of {tuple(mask.shape)}",
                "log-probabilities and mask describe the same tokens",
                "Cut all three to the response tokens, with the same padding.",
            )
        if not tensor.is_floating_point():
            raise MismatchInputError(
                name,
                f"dtype {tensor.dtype}",
                "log-probabilities are floating point",
                "Pass the log-probabilities, not the token ids.",
            )
    keep = _selected(mask)
    for name, tensor in named.items():
        _check_logprobs(name, tensor, keep)
    return keep


def _selected(mask: torch.Tensor) -> torch.Tensor:
    keep = mask == 1
    if mask.dim() != 2:
        found = f"shape {tuple(mask.shape)}"
        rule = "tensors are (batch, seq)"
        remedy = "Use `.unsqueeze(0)` for a single sequence; pad packed sequences first."
    elif not bool((keep | (mask == 0)).all()):
        found = f"values between {mask.min().item()} and {mask.max().item()}"
        rule = "a mask holds 0 and 1 only"
        remedy = "Pass per-token loss weights to the loss, not as the mask."
    elif not bool(keep.any()):
        found = f"no token selected out of {mask.numel()}"
        rule = "a mean needs at least one response token"
        remedy = "Skip the batch, or look for a filter that dropped every sample."
    else:
        return keep
    raise MismatchInputError("mask", found, rule, remedy)


def _check_logprobs(name: str, logprobs: torch.Tensor, keep: torch.Tensor) -> None:
    # Written so that NaN counts as bad; one device round trip when all is well.
    good = (logprobs <= _LOGPROB_ROUNDING) & (logprobs > -torch.inf)
    bad = keep & ~good
    if not bool(bad.any()):
        return
    row, column = (int(i) for i in bad.nonzero()[0])
    raise MismatchInputError(
        f"{name}[{row}, {column}]",
        f"{logprobs[row, column].item()} ({int(bad.sum())} such tokens)",
        "a sampled token's log-probability is finite and not above 0",
        "Pass log-probabilities (no logits, no probabilities), of a forward pass that gave no NaN.",
    )


def _sequence_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Masked mean of each row that has a token: (batch, seq) -> (sequences,), FP64."""
    counts = mask.sum(dim=-1)
    sums = torch.where(mask, values, torch.zeros_like(values)).double().sum(dim=-1)
    return (sums / counts.clamp(min=1))[counts > 0]


def _pearson(left: torch.Tensor, right: torch.Tensor) -> float:
    if left.numel() < 2 or bool(left.min() == left.max()) or bool(right.min() == right.max()):
        return float("nan")
    return torch.corrcoef(torch.stack([left, right]))[0, 1].item()
