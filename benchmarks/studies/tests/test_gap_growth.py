"""Why the gap grows: what is measured is the model's, whoever wrote the answers."""

from __future__ import annotations

import math

import pytest
import torch
from studies.real_model.gap_growth import PARTS, Gap, Served, gap_of, line_of, measure_growth
from studies.real_model.rl import RESPONSE_TOKENS
from studies.real_model.rl_policy import trained_policy

from sglang_fp8rl.lab.plan_offline import make_plan
from sglang_fp8rl.lab.sensitivity.samples import Sample
from sglang_fp8rl.lab.testing.checkpoints import make_config, make_state_dict, save_checkpoint

pytestmark = pytest.mark.usefixtures("plans_in_forks")


def encode(text):
    return [ord(character) for character in text]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    config = make_config("llama", num_hidden_layers=3, vocab_size=128)
    state = make_state_dict(config, seed=0)
    return save_checkpoint(tmp_path_factory.mktemp("start"), config, state)


def measured(start, trained, **how):
    lines = measure_growth(start, trained, encode, trained_layers=1, problems=3, samples=2, **how)
    return {(line.model, line.answers, line.part): line for line in lines}


def test_a_shift_of_all_logits_is_no_gap():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    gap = gap_of(logits, logits + 3.0)
    assert max(abs(gap.kl), gap.noise, gap.noise_of_likely) < 1e-12
    assert gap.spread == pytest.approx(float(logits.std(correction=0)))


def test_the_figures_of_two_tokens_are_those_of_the_formulas():
    clean = torch.tensor([math.log(0.9), math.log(0.1)], dtype=torch.float64)
    gap = gap_of(clean, clean + torch.tensor([0.0, 1.0], dtype=torch.float64))
    other = 0.1 * math.e / (0.9 + 0.1 * math.e)
    expected = 0.9 * math.log(0.9 / (1 - other)) + 0.1 * math.log(0.1 / other)
    assert gap.kl == pytest.approx(expected)
    assert gap.entropy == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))
    assert gap.noise == pytest.approx(0.5)
    assert gap.noise_of_likely == pytest.approx(0.3)  # a coin of 0.1: sqrt(0.1 * 0.9)


def test_a_model_that_was_not_trained_has_its_own_gap_on_either_answers(start):
    found = measured(start, start)
    assert len(found) == 4 * len(PARTS)
    for (_, _, part), line in found.items():
        assert line.gap == found["start", "start", part].gap
        assert 0 < line.kl.low <= line.kl.value <= line.kl.high
    parts = [found["start", "start", part].gap.kl for part in PARTS]
    assert len(set(parts)) == len(PARTS)


def test_the_interval_is_over_problems_not_over_tokens():
    samples = [Sample((1,) * n, (7, 8)) for n in (1, 2, 3) for _ in range(2)]
    alike = [Gap(0.0, kl, 0.0, 0.0, 0.0) for kl in (1.0, 2.0, 3.0, 4.0) * 3]
    apart = [Gap(0.0, float(n), 0.0, 0.0, 0.0) for n in (0, 3, 6) for _ in range(4)]
    line = line_of("start", "start", "all", samples, alike)
    assert (line.kl.low, line.kl.value, line.kl.high) == (2.5, 2.5, 2.5)
    line = line_of("start", "start", "all", samples, apart)
    assert (line.kl.low, line.kl.value, line.kl.high, line.kl_median) == (0.0, 3.0, 6.0, 3.0)


def test_nothing_behind_the_end_of_an_answer_counts(start):
    plan, prompts = make_plan(str(start)), [encode("2+3=")]
    (whole,) = Served(start, plan, end=127, trained_layers=1).answers(prompts, 1, seed=0)
    second = whole.answer[1]
    (cut,) = Served(start, plan, end=second, trained_layers=1).answers(prompts, 1, seed=0)
    assert len(whole.answer) == RESPONSE_TOKENS
    assert cut.answer == whole.answer[: 1 + whole.answer.index(second)]
    assert cut.tokens < RESPONSE_TOKENS


def test_a_policy_that_is_kept_is_measured_as_it_was_trained(start, tmp_path):
    policy = trained_policy(start, 0, 1)
    with torch.no_grad():
        policy.masters["model.layers.2.mlp.down_proj.weight"].mul_(3.0)
    policy.save(tmp_path / "kept")
    found = measured(start, tmp_path / "kept")
    same = found["start", "start", "front"].gap
    assert found["trained", "start", "front"].gap.spread != same.spread
    assert found["trained", "trained", "trained"].gap != found["start", "trained", "trained"].gap


def test_with_the_weights_as_served_what_is_left_is_what_activations_make(start):
    plain, as_served = measured(start, start), measured(start, start, as_served=True)
    for key, line in as_served.items():
        assert 0 < line.gap.kl < plain[key].gap.kl
