"""What the real-model benchmark makes of log-probabilities: means, tails, intervals, positions."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from studies.real_model import measures
from studies.real_model.report import read_lines, write_lines

from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.lab.metrics import mismatch_metrics

LENGTHS = (5, 9, 1, 17, 12)


@pytest.fixture
def sides():
    """Log-probabilities of the same answers by a rollout engine and a trainer."""
    generator = torch.Generator().manual_seed(3)
    rollout = [-2 * torch.rand(length, generator=generator) - 0.5 for length in LENGTHS]
    noise = [0.2 * torch.randn(length, generator=generator) for length in LENGTHS]
    return rollout, [(row + off).clamp(max=0) for row, off in zip(rollout, noise, strict=True)]


def test_means_are_those_of_the_packages_own_metrics(sides):
    rollout, trainer = sides
    found = measures.summarize(measures.gap(*sides), measures.Resamples(len(LENGTHS)))
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones(length) for length in LENGTHS], batch_first=True)
    expected = mismatch_metrics(
        pad(rollout, batch_first=True), pad(trainer, batch_first=True), mask
    )
    assert found["tokens"] == expected.tokens
    assert found["kl_k3"]["value"] == pytest.approx(expected.kl_k3, rel=1e-5)
    assert found["mult_prob_error"]["value"] == pytest.approx(expected.mult_prob_error, rel=1e-5)
    assert found["worst"]["abs_log_ratio"] == pytest.approx(expected.logprob_diff_max, rel=1e-5)
    assert found["kl_k3"]["low"] < found["kl_k3"]["value"] < found["kl_k3"]["high"]


def test_the_worst_token_is_found_where_it_is(sides):
    rollout, trainer = sides
    trainer[3][11] = rollout[3][11] - 7
    worst = measures.summarize(measures.gap(rollout, trainer), measures.Resamples(5))["worst"]
    assert (worst["answer"], worst["token"]) == (3, 11)
    assert worst["abs_log_ratio"] == pytest.approx(7, rel=1e-6)


def test_repeated_tokens_make_no_interval_narrower(sides):
    once = measures.gap(*sides)
    tenfold = measures.Gap([np.repeat(row, 10) for row in once.log_ratio])
    drawn = measures.Resamples(len(LENGTHS))
    one, ten = (measures.summarize(gap, drawn)["kl_k3"] for gap in (once, tenfold))
    assert ten == pytest.approx(one)


def test_an_interval_covers_the_mean_about_as_often_as_it_says():
    draw = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        values = draw.exponential(size=60)
        found = measures.Resamples(60, seed, count=500).ratio(values, np.ones(60))
        hits += found.low <= 1 <= found.high
    assert 170 <= hits <= 200


def test_a_pair_is_compared_answer_by_answer(sides):
    gap = measures.gap(*sides)
    drawn = measures.Resamples(len(LENGTHS))
    same = measures.against(gap, gap, drawn)
    assert same["kl_k3"] == {"value": 1, "low": 1, "high": 1}
    wider = measures.Gap([row + np.sign(row) * 0.5 for row in gap.log_ratio])
    assert measures.against(wider, gap, drawn)["mult_prob_error_less_one"]["low"] > 1


def test_positions_count_every_token_once(sides):
    gap = measures.gap(*sides)
    bins = measures.by_position(gap)
    assert [one["from"] for one in bins] == [0, 4, 8, 16]
    assert sum(one["tokens"] for one in bins) == sum(LENGTHS)
    sixteenth = gap.log_ratio[3][16]
    assert bins[-1]["kl_k3"] == pytest.approx(math.exp(sixteenth) - 1 - sixteenth)


def test_perplexity_and_its_ratio():
    drawn = measures.Resamples(3)
    uniform = [torch.full((length,), -math.log(50)) for length in (4, 7, 9)]
    worse = [row - math.log(1.1) for row in uniform]
    assert measures.perplexity(uniform, drawn)["value"] == pytest.approx(50, rel=1e-5)
    ratio = measures.perplexity_ratio(worse, uniform, drawn)
    assert ratio == pytest.approx({"value": 1.1, "low": 1.1, "high": 1.1}, rel=1e-5)


def test_sides_of_other_tokens_are_refused(sides):
    rollout, trainer = sides
    with pytest.raises(ConfigError, match="the same tokens"):
        measures.gap(rollout, trainer[:-1])


def test_one_answer_has_no_interval():
    with pytest.raises(ConfigError, match="two at least"):
        measures.Resamples(1)


def test_lines_of_another_model_stay_in_the_file(tmp_path):
    path = tmp_path / "lines.jsonl"
    for model, value in (("one", 1.0), ("other", 2.0), ("one", 1 / 3)):
        write_lines([{"kind": "conditions", "model": model, "value": {"x": [value]}}], path)
    assert read_lines(path, "one")[0]["value"] == {"x": [0.33333]}
    assert [json.loads(line)["model"] for line in path.read_text().splitlines()] == ["other", "one"]
