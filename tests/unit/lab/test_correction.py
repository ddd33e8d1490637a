"""Importance weights: against veRL's own functions, and by the properties that define them."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from verl.trainer.ppo import rollout_corr_helper as verl

from sglang_fp8rl.lab.correction import importance_weights
from sglang_fp8rl.lab.metrics import MismatchInputError

LEVELS = ["token", "sequence", "geometric"]
truncated = functools.partial(importance_weights, cap=2.0)
masked = functools.partial(importance_weights, band=(0.5, 2.0))
WEIGHTINGS = [importance_weights, truncated, masked]


def small_gap(seed: int, gap: float = 0.3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities that differ by about `gap`; ragged rows, one of them empty."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(7, 33, generator=generator) * 4 - 0.01
    noise = torch.randn(7, 33, generator=generator) * gap
    trainer = (rollout + noise).clamp(max=0)
    trainer[1, 0] = rollout[1, 0]  # one row is always inside the band
    lengths = torch.tensor([33, 1, 0, 17, 32, 2, 9])
    return rollout, trainer, torch.arange(33) < lengths[:, None]


def overflowing(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ratios beyond FP32, in both directions, beside ordinary ones."""
    rollout, trainer, mask = small_gap(seed)
    rollout[0, 3], trainer[0, 3] = -200.0, -0.5
    rollout[3, 0], trainer[3, 0] = -0.5, -3e38
    rollout[4, :], trainer[4, :] = -30.0, -1.0
    return rollout, trainer, mask


INPUTS = [small_gap(0), small_gap(1, gap=3.0), overflowing(2)]


@pytest.mark.parametrize("inputs", INPUTS, ids=["small", "wide", "overflowing"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("cap", [1.0, 2.0, 10.0])
def test_truncated_weights_equal_verl_bit_for_bit(inputs, level, cap):
    rollout, trainer, mask = inputs
    theirs, _ = verl.compute_rollout_correction_weights(
        trainer - rollout, mask.float(), rollout_is=level, rollout_is_threshold=cap
    )
    ours = importance_weights(rollout, trainer, mask, cap=cap, level=level)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("inputs", INPUTS, ids=["small", "wide", "overflowing"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("band", [(0.5, 2.0), (0.9, 1.1), (1e-6, 1e6)])
def test_masked_weights_equal_verl_bit_for_bit(inputs, level, band):
    rollout, trainer, mask = inputs
    theirs, _ = verl.compute_rollout_correction_weights(
        trainer - rollout,
        mask.float(),
        rollout_is=level,
        rollout_is_threshold=f"{band[0]}_{band[1]}",
    )
    ours = importance_weights(rollout, trainer, mask, band=band, level=level)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("inputs", INPUTS[:2], ids=["small", "wide"])
@pytest.mark.parametrize(
    ("level", "option"),
    [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")],
)
def test_acceptance_equals_verl_with_the_band_inverted(inputs, level, option):
    # veRL bounds pi_rollout / pi_trainer: its "a_b" is our [1/b, 1/a]. An asymmetric band shows it.
    rollout, trainer, mask = inputs
    theirs, _ = verl.compute_rollout_rejection_mask(
        trainer - rollout, mask.float(), rollout_rs=option, rollout_rs_threshold="0.98_1.3"
    )
    weights = importance_weights(rollout, trainer, mask, band=(1 / 1.3, 1 / 0.98), level=level)
    ours = weights > 0
    assert torch.equal(ours, theirs.bool())
    assert 0 < ours.sum() < mask.sum()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("level", LEVELS)
def test_equal_log_probabilities_weigh_one(weighting, level):
    rollout, _, mask = small_gap(3)
    assert torch.equal(weighting(rollout, rollout, mask, level=level), mask.float())


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("level", LEVELS)
def test_padding_is_never_read(weighting, level):
    rollout, trainer, mask = small_gap(4)
    clean = weighting(rollout, trainer, mask, level=level)
    for poison in (float("nan"), float("inf"), -float("inf"), 7.0):
        dirty_rollout, dirty_trainer = rollout.clone(), trainer.clone()
        dirty_rollout[~mask], dirty_trainer[~mask] = poison, -1.0
        assert torch.equal(weighting(dirty_rollout, dirty_trainer, mask, level=level), clean)
    assert torch.equal(clean[~mask], torch.zeros_like(clean[~mask]))


@pytest.mark.parametrize("level", LEVELS)
def test_weights_stay_finite_when_ratios_overflow(level):
    rollout, trainer, mask = overflowing(5)
    assert (trainer - rollout).double().exp().max() > torch.finfo(torch.float32).max
    assert importance_weights(rollout, trainer, mask, level=level).isfinite().all()
    assert truncated(rollout, trainer, mask, level=level).max() == 2.0


def test_sequence_weight_is_the_product_and_geometric_its_root():
    rollout, trainer, mask = small_gap(6)
    token = importance_weights(rollout, trainer, mask).double()
    sequence = importance_weights(rollout, trainer, mask, level="sequence")
    geometric = importance_weights(rollout, trainer, mask, level="geometric")
    for row in range(7):
        length = int(mask[row].sum())
        if not length:
            continue
        product = token[row][mask[row]].prod().item()
        assert sequence[row][mask[row]].tolist() == pytest.approx([product] * length, rel=1e-4)
        assert geometric[row][mask[row]].tolist() == pytest.approx(
            [product ** (1 / length)] * length, rel=1e-5
        )


def test_band_ends_are_kept_and_one_step_beyond_is_not():
    rollout = torch.tensor([[-1.0, -1.0, -1.0, -1.0]], dtype=torch.float64)
    ratio = torch.tensor([[0.5, 2.0, 0.499, 2.001]], dtype=torch.float64)
    trainer = rollout + ratio.log()
    mask = torch.ones(1, 4, dtype=torch.bool)
    # The band is what the weights round to, so that log() and exp() don't blur the test.
    low, high = importance_weights(rollout, trainer, mask)[0, :2].tolist()
    kept = importance_weights(rollout, trainer, mask, band=(low, high)) > 0
    assert kept.tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_no_gradient_flows_through_weights(weighting):
    rollout, trainer, mask = small_gap(7)
    assert not weighting(rollout, trainer.requires_grad_(), mask).requires_grad


def test_bf16_input_is_summed_in_fp32():
    # 4,096 tokens of +2^-9: a BF16 running sum would stop growing long before 8.
    rollout = torch.full((1, 4096), -1.0, dtype=torch.bfloat16)
    trainer = torch.full((1, 4096), -1.0 + 2**-8, dtype=torch.bfloat16)
    mask = torch.ones(1, 4096, dtype=torch.bool)
    gap = (trainer.double() - rollout.double()).sum().item()
    weight = importance_weights(rollout, trainer, mask, level="sequence")[0, 0]
    assert weight.dtype == torch.float32
    assert weight.item() == pytest.approx(math.exp(gap), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_mask_dtype_does_not_matter(dtype):
    rollout, trainer, mask = small_gap(8)
    expected = truncated(rollout, trainer, mask)
    assert torch.equal(truncated(rollout, trainer, mask.to(dtype)), expected)


def test_inputs_are_not_changed():
    inputs = overflowing(9)
    copies = [tensor.clone() for tensor in inputs]
    for weighting in WEIGHTINGS:
        weighting(*inputs, level="geometric")
    assert all(torch.equal(now, then) for now, then in zip(inputs, copies, strict=True))


LOGPROBS, MASK = torch.full((2, 3), -1.0), torch.ones(2, 3)
NAN = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, float("nan"), -1.0]])


@pytest.mark.parametrize(
    ("rollout", "trainer", "mask", "message"),
    [
        (LOGPROBS[:, :2], LOGPROBS, MASK, r"rollout_logprobs: shape \(2, 2\)"),
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
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_bad_input_is_named(weighting, rollout, trainer, mask, message):
    with pytest.raises(MismatchInputError, match=message):
        weighting(rollout, trainer, mask)


def test_bad_options_are_named():
    good = (LOGPROBS, LOGPROBS, MASK)
    with pytest.raises(MismatchInputError, match="level: 'tokens'; levels are token, sequence"):
        importance_weights(*good, level="tokens")
    for cap in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(MismatchInputError, match="cap"):
            importance_weights(*good, cap=cap)
    for low, high in ((2.0, 0.5), (0.0, 2.0), (0.5, float("inf")), (float("nan"), 2.0)):
        with pytest.raises(MismatchInputError, match="low <= high"):
            importance_weights(*good, band=(low, high))
