"""Mismatch metrics: against veRL's own functions, and by the properties that define them."""

from __future__ import annotations

import math

import pytest
import torch
from verl.trainer.ppo import rollout_corr_helper as verl

from sglang_fp8rl.lab.metrics import EXPONENT_BOUND, MismatchInputError, mismatch_metrics


def batch(seed: int, gap: float = 0.3, rows: int = 5, length: int = 29):
    """Rows of different length, none empty; probabilities over the whole of (0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(rows, length, generator=generator) * 5 - 0.01
    trainer = (rollout + torch.randn(rows, length, generator=generator) * gap).clamp(max=0)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    return rollout, trainer, torch.arange(length) < lengths


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gap", [0.0, 1e-3, 0.3, 4.0])
def test_metrics_agree_with_verl(seed, gap):
    rollout, trainer, mask = batch(seed, gap)
    theirs = verl.compute_offpolicy_metrics(trainer, rollout, mask.float())
    ours = mismatch_metrics(rollout, trainer, mask)
    # veRL sums in FP32; k3 and chi2 cancel there, hence an absolute part as well.
    close = {"rel": 1e-4, "abs": 1e-6}
    assert ours.kl_k1 == pytest.approx(theirs["kl"], **close)
    assert ours.kl_k3 == pytest.approx(theirs["k3_kl"], **close)
    assert ours.chi2 == pytest.approx(theirs["chi2_token"], **close)
    assert ours.rollout_ppl == pytest.approx(theirs["rollout_ppl"], **close)
    assert ours.trainer_ppl == pytest.approx(theirs["training_ppl"], **close)
    assert ours.log_ppl_gap == pytest.approx(theirs["log_ppl_diff"], **close)
    assert ours.log_ppl_gap_abs == pytest.approx(theirs["log_ppl_abs_diff"], **close)


@pytest.mark.parametrize("seed", range(4))
def test_probability_differences_agree_with_verl_debug_metrics(seed):
    from verl.protocol import DataProto
    from verl.utils.debug.metrics import calculate_debug_metrics

    rollout, trainer, mask = batch(seed)
    data = DataProto.from_dict(
        tensors={
            "rollout_log_probs": rollout,
            "old_log_probs": trainer,
            "response_mask": mask,
            "responses": torch.zeros_like(mask, dtype=torch.long),
        }
    )
    theirs = calculate_debug_metrics(data)
    ours = mismatch_metrics(rollout, trainer, mask)
    assert ours.prob_diff_max == pytest.approx(theirs["training/rollout_probs_diff_max"], rel=1e-4)
    assert ours.prob_diff_mean == pytest.approx(
        theirs["training/rollout_probs_diff_mean"], rel=1e-4
    )
    assert ours.prob_pearson == pytest.approx(
        theirs["training/rollout_actor_probs_pearson_corr"], rel=1e-4
    )


@pytest.mark.parametrize("seed", range(4))
def test_k3_agrees_with_verl_kl_penalty_inside_its_clamp(seed):
    from verl.trainer.ppo.core_algos import kl_penalty

    rollout, trainer, mask = batch(seed, gap=0.8)
    # kl_penalty(logprob, ref) is KL(logprob || ref): the sampler comes first.
    per_token = kl_penalty(rollout, trainer, "k3")
    assert per_token.max() < 10, "beyond 10 veRL clamps each token's estimate, we don't"
    expected = per_token[mask].double().mean().item()
    assert mismatch_metrics(rollout, trainer, mask).kl_k3 == pytest.approx(expected, rel=1e-4)


def test_equal_log_probabilities_have_no_gap():
    rollout, _, mask = batch(0)
    metrics = mismatch_metrics(rollout, rollout, mask)
    assert (metrics.kl_k1, metrics.kl_k3, metrics.chi2) == (0, 0, 0)
    assert (metrics.ratio_min, metrics.ratio_mean, metrics.ratio_max) == (1, 1, 1)
    assert (metrics.mult_prob_error, metrics.log_ppl_gap, metrics.prob_diff_max) == (1, 0, 0)
    assert metrics.prob_pearson == pytest.approx(1)


def test_one_token_by_hand():
    metrics = mismatch_metrics(
        torch.tensor([[math.log(0.5), 0.0]]),
        torch.tensor([[math.log(0.25), 0.0]]),
        torch.tensor([[1, 0]]),
    )
    assert metrics.tokens == metrics.sequences == 1
    assert metrics.ratio_mean == pytest.approx(0.5)
    assert metrics.kl_k1 == pytest.approx(math.log(2))
    assert metrics.kl_k3 == pytest.approx(0.5 - 1 + math.log(2))
    assert metrics.mult_prob_error == pytest.approx(2)
    assert (metrics.rollout_ppl, metrics.trainer_ppl) == pytest.approx((2, 4))
    assert metrics.log_ppl_gap == pytest.approx(math.log(2))
    assert metrics.prob_diff_mean == pytest.approx(0.25)
    assert math.isnan(metrics.prob_pearson)


def test_both_estimators_find_the_exact_divergence():
    generator = torch.Generator().manual_seed(11)
    p = torch.softmax(torch.randn(50, generator=generator), 0)
    q = torch.softmax(p.log() + torch.randn(50, generator=generator) * 0.4, 0)
    exact = (p * (p / q).log()).sum().item()
    tokens = torch.multinomial(p, 200_000, replacement=True, generator=generator)[None]
    metrics = mismatch_metrics(p.log()[tokens], q.log()[tokens], torch.ones_like(tokens))
    assert metrics.kl_k1 == pytest.approx(exact, rel=0.05)
    assert metrics.kl_k3 == pytest.approx(exact, rel=0.05)
    assert metrics.ratio_mean == pytest.approx(1, abs=0.02)  # importance weights average to one


def test_swapping_the_engines_inverts_the_gap():
    rollout, trainer, mask = batch(1)
    one, other = mismatch_metrics(rollout, trainer, mask), mismatch_metrics(trainer, rollout, mask)
    assert one.kl_k1 == -other.kl_k1
    assert one.log_ppl_gap == -other.log_ppl_gap
    assert one.mult_prob_error == other.mult_prob_error
    assert one.ratio_max == pytest.approx(1 / other.ratio_min)


def test_ratios_that_overflow_are_clamped_counted_and_finite():
    rollout = torch.tensor([[-200.0, -1.0, -1.0, -20.5]])
    trainer = torch.tensor([[-0.5, -3e38, -1.1, -0.5]])
    mask = torch.ones(1, 4)
    assert verl.compute_offpolicy_metrics(trainer, rollout, mask)["k3_kl"] == math.inf
    metrics = mismatch_metrics(rollout, trainer, mask)
    assert metrics.clamped_tokens == 2  # a log-ratio of exactly the bound is not clamped
    assert metrics.ratio_max == pytest.approx(math.exp(EXPONENT_BOUND))
    # One trainer probability of 0 makes its perplexity infinite: true, so it is not hidden.
    finite = {k: v for k, v in metrics.as_dict().items() if math.isfinite(v)}
    assert set(metrics.as_dict()) - set(finite) <= {"trainer_ppl"}
    assert metrics.logprob_diff_max == pytest.approx(3e38, rel=1e-6)


def test_tiny_gaps_are_not_lost_to_rounding():
    # exp(x) - x - 1 at x = 1e-6 is 5e-13; computed as written in FP32 it would be 0 or 1e-7.
    rollout = torch.full((1, 1000), -1.0, dtype=torch.float64)
    metrics = mismatch_metrics(rollout, rollout + 1e-6, torch.ones(1, 1000))
    assert metrics.kl_k3 == pytest.approx(5e-13, rel=1e-3)


def test_padding_is_never_read():
    rollout, trainer, mask = batch(2)
    clean = mismatch_metrics(rollout, trainer, mask)
    for poison in (float("nan"), float("inf"), 50.0):
        rollout[~mask], trainer[~mask] = poison, -poison
        assert mismatch_metrics(rollout, trainer, mask) == clean


def test_rows_without_a_response_token_do_not_count():
    rollout, trainer, mask = batch(3)
    padded = [torch.cat([tensor, torch.zeros_like(tensor[:2])]) for tensor in (rollout, trainer)]
    longer_mask = torch.cat([mask, torch.zeros_like(mask[:2])])
    assert mismatch_metrics(*padded, longer_mask) == mismatch_metrics(rollout, trainer, mask)
    # veRL counts each of them as a sequence of perplexity 1.
    theirs = verl.compute_offpolicy_metrics(padded[1], padded[0], longer_mask.float())
    assert theirs["training_ppl"] < mismatch_metrics(rollout, trainer, mask).trainer_ppl


def test_layout_does_not_matter():
    rollout, trainer, mask = batch(4)
    expected = mismatch_metrics(rollout, trainer, mask).as_dict()
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0))
    shuffled = mismatch_metrics(rollout[order], trainer[order], mask[order]).as_dict()
    assert shuffled == pytest.approx(expected, rel=1e-12)


def test_as_dict_holds_plain_numbers():
    values = mismatch_metrics(*batch(5)).as_dict()
    assert {type(value) for value in values.values()} <= {int, float}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_mask_dtype_does_not_matter(dtype):
    rollout, trainer, mask = batch(8)
    expected = mismatch_metrics(rollout, trainer, mask)
    assert mismatch_metrics(rollout, trainer, mask.to(dtype)) == expected


LOGPROBS, MASK = torch.full((2, 3), -1.0), torch.ones(2, 3)
NAN = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, float("nan"), -1.0]])


@pytest.mark.parametrize(
    ("rollout", "trainer", "mask", "message"),
    [
        (LOGPROBS[:, :2], LOGPROBS, MASK, r"rollout_logprobs: shape \(2, 2\).*same tokens"),
        (LOGPROBS, LOGPROBS[:1], MASK, r"trainer_logprobs: shape \(1, 3\)"),
        (LOGPROBS, LOGPROBS, MASK[:, :2], r"mask of \(2, 2\)"),
        (LOGPROBS[0], LOGPROBS[0], MASK[0], r"\(batch, seq\).*unsqueeze"),
        (LOGPROBS, LOGPROBS, MASK * 0, "no token selected out of 6"),
        (LOGPROBS[:0], LOGPROBS[:0], MASK[:0], "no token selected out of 0"),
        (LOGPROBS, LOGPROBS, MASK * 0.5, "0 and 1 only"),
        (LOGPROBS, LOGPROBS, MASK * float("nan"), "0 and 1 only"),
        (LOGPROBS, NAN, MASK, r"trainer_logprobs\[1, 1\]: nan \(1 such tokens\)"),
        (NAN, LOGPROBS, MASK, r"rollout_logprobs\[1, 1\]: nan"),
        (LOGPROBS, LOGPROBS - float("inf"), MASK, r"\[0, 0\]: -inf \(6 such"),
        (LOGPROBS, LOGPROBS.exp(), MASK, "no logits, no probabilities"),
        (LOGPROBS.long(), LOGPROBS, MASK, "rollout_logprobs: dtype torch.int64"),
    ],
)
def test_bad_input_is_named(rollout, trainer, mask, message):
    with pytest.raises(MismatchInputError, match=message):
        mismatch_metrics(rollout, trainer, mask)
