"""The small DAPO benchmark: its task, what it draws, its files, and its check, without a server."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from small_dapo import records
from small_dapo.changes import Changed, changed
from small_dapo.check import (
    BASELINE,
    CHECKED,
    FINAL_STEPS,
    Bounds,
    check,
    derive_bounds,
    final_accuracy,
    load_bounds,
)
from small_dapo.dynamic_sampling import dynamic_sampling
from small_dapo.loop import nudged
from small_dapo.rollout import Group
from small_dapo.settings import Settings
from small_dapo.summary import equal_rollouts, late_accuracy
from small_dapo.task import (
    EOS,
    MAX_RESPONSE_TOKENS,
    Problem,
    draw_problems,
    is_correct,
    overlong_penalty,
    reward,
)

from sglang_fp8rl.errors import ConfigError

ACCURACY = Path(__file__).parents[3] / "benchmarks" / "accuracy"
BOUNDS = Bounds(accuracy_band=0.05, kl_k3=1e-3, steps=10, seeds=2)


# -- task ------------------------------------------------------------------------------------------


def test_only_the_sorted_digits_and_their_end_are_right():
    problem = Problem((3, 1, 2, 1, 0))
    assert is_correct(problem, problem.answer)
    assert not is_correct(problem, problem.answer[:-1])
    assert not is_correct(problem, [*problem.answer, EOS])
    assert not is_correct(problem, [*reversed(problem.answer[:-1]), EOS])


def test_training_and_validation_share_no_problem():
    draw = random.Random(0)
    trained = {p.digits for p in draw_problems(draw, 5000)}
    held_out = {p.digits for p in draw_problems(draw, 1000, held_out=True)}
    assert not trained & held_out


def test_no_right_answer_is_punished_for_its_length_and_a_cut_one_always_is():
    for problem in draw_problems(random.Random(0), 500):
        assert reward(problem, problem.answer) == 1.0
    assert overlong_penalty(MAX_RESPONSE_TOKENS) == -1.0
    penalties = [overlong_penalty(length) for length in range(1, MAX_RESPONSE_TOKENS + 1)]
    assert penalties == sorted(penalties, reverse=True)
    assert len(set(penalties)) == 4  # 0, and one for each token of the buffer


# -- dynamic sampling ------------------------------------------------------------------------------


def group(*right: bool) -> Group:
    problem = Problem((2, 1, 0, 3, 4))
    wrong = [EOS]
    return Group(problem, [problem.answer if hit else wrong for hit in right], [[0.0]] * len(right))


def test_groups_all_right_or_all_wrong_are_drawn_and_not_used():
    batch = [group(True, True), group(True, False), group(False, False)]
    settings = Settings(train_prompts=2, max_generations=3)
    sampled = dynamic_sampling(lambda: batch, settings)
    assert sampled.used == [batch[1]] * 2
    assert len(sampled.drawn) == 2 * len(batch)


def test_drawing_ends_at_the_limit_even_if_nothing_was_found():
    settings = Settings(train_prompts=2, max_generations=3)
    sampled = dynamic_sampling(lambda: [group(True, True)], settings)
    assert sampled.used == []
    assert len(sampled.drawn) == 3


# -- what a step changes ---------------------------------------------------------------------------


def test_changed_codes_and_scales_are_counted_by_block_with_ragged_edges():
    codes = torch.randn(256, 300).to(torch.float8_e4m3fn)
    before = {"w": codes, "w_scale_inv": torch.ones(2, 3), "norm": torch.ones(3)}
    assert changed(before, {**before, "norm": torch.zeros(3)}) == Changed(0.0, 0.0)
    other = codes.clone()
    other.view(torch.uint8)[130, 299] ^= 1  # in the last, ragged block
    other.view(torch.uint8)[131, 298] ^= 1
    scale = torch.ones(2, 3)
    scale[0, 1] = 2.0
    now = {**before, "w": other, "w_scale_inv": scale}
    assert changed(before, now) == Changed(2 / (256 * 300), 2 / 6)


# -- files -----------------------------------------------------------------------------------------


def test_records_come_back_in_order_and_unwanted_runs_go(tmp_path):
    path = tmp_path / "runs.jsonl"
    for step in (1, 0):
        for arm in ("a", "b"):
            records.append(path, {"arm": arm, "seed": 0, "step": step, "x": 1 / 3})
    runs = records.load(path)
    assert [record["step"] for record in runs["a", 0]] == [0, 1]
    assert runs["a", 0][0]["x"] == 0.33333
    records.keep(path, [("b", 0)])
    assert set(records.load(path)) == {("b", 0)}
    assert records.load(tmp_path / "absent.jsonl") == {}


# -- the check -------------------------------------------------------------------------------------


def run(accuracy: float, kl: float, steps: int = BOUNDS.steps) -> list[dict]:
    first = {"step": 0, "val_accuracy": 0.1}
    return [
        first,
        *(
            {"step": s, "val_accuracy": accuracy, "kl_k3": kl, "rollout_digest": f"{s}"}
            for s in range(1, steps + 1)
        ),
    ]


def runs(fp8_accuracy: float, fp8_kl: float) -> dict:
    made = {}
    for seed in range(BOUNDS.seeds):
        made[BASELINE, seed] = run(0.5, 1e-5)
        made[CHECKED, seed] = run(fp8_accuracy, fp8_kl)
    return made


@pytest.mark.parametrize(
    ("accuracy", "kl", "expected"),
    [
        (0.5, 5e-4, [True, True]),
        (0.54, 5e-4, [True, True]),
        (0.44, 5e-4, [False, True]),
        (0.56, 5e-4, [False, True]),  # better than BF16 by more than chance is a finding, too
        (0.5, 2e-3, [True, False]),
        (float("nan"), float("nan"), [False, False]),
    ],
)
def test_the_check_is_red_outside_its_band_and_above_its_bound(accuracy, kl, expected):
    assert [finding.ok for finding in check(runs(accuracy, kl), BOUNDS)] == expected


@pytest.mark.parametrize("bad", [2e-3, float("nan")])
@pytest.mark.parametrize("seed", range(BOUNDS.seeds))
def test_one_bad_seed_is_enough_for_the_kl(bad, seed):
    made = runs(0.5, 5e-4)
    made[CHECKED, seed] = run(0.5, bad)
    assert not check(made, BOUNDS)[1].ok


@pytest.mark.parametrize("missing", [(CHECKED, 1), (BASELINE, 0)])
def test_a_run_that_is_missing_or_short_is_refused(missing):
    made = runs(0.5, 5e-4)
    made[missing] = run(0.5, 5e-4, steps=3)
    with pytest.raises(ConfigError, match="bounds hold for 2 seeds of 10 steps"):
        check(made, BOUNDS)
    del made[missing]
    with pytest.raises(ConfigError, match="bounds hold for"):
        check(made, BOUNDS)


def test_final_accuracy_is_of_the_last_steps_only():
    rising = [{"step": s, "val_accuracy": s / 100} for s in range(21)]
    expected = sum(range(21 - FINAL_STEPS, 21)) / FINAL_STEPS / 100
    assert final_accuracy(rising) == pytest.approx(expected)
    assert final_accuracy(rising, until=10) == pytest.approx(0.08)


def test_bounds_derived_from_noise_hold_for_that_noise_and_not_for_ten_times_its_kl():
    draw = random.Random(0)
    long = {}
    for seed in range(3):
        for arm, kl in ((BASELINE, 1e-5), (CHECKED, 4e-4)):
            long[arm, seed] = [
                {
                    "step": s,
                    "val_accuracy": 0.8 + draw.gauss(0, 0.02),
                    "kl_k3": kl * draw.uniform(0.5, 1.5),
                }
                for s in range(61)
            ]
    bounds = derive_bounds(long, steps=20, seeds=2)
    cut = {key: rows[:21] for key, rows in long.items() if key[1] < 2}
    assert all(finding.ok for finding in check(cut, bounds))
    worse = {
        key: [{**r, "kl_k3": r["kl_k3"] * 10} for r in rows] if key[0] == CHECKED else rows
        for key, rows in cut.items()
    }
    assert [finding.ok for finding in check(worse, bounds)] == [True, False]


def test_equal_rollouts_are_counted_by_their_digests():
    made = runs(0.5, 5e-4)
    assert equal_rollouts(made, BASELINE, CHECKED) == (20, 20)
    made[CHECKED, 0][3]["rollout_digest"] = "other"
    assert equal_rollouts(made, BASELINE, CHECKED) == (19, 20)


# -- what is committed -----------------------------------------------------------------------------


def test_the_committed_bounds_are_those_of_the_committed_run():
    results = ACCURACY.parent / "results" / "dapo_small.jsonl"
    bounds = load_bounds(ACCURACY / "bounds.json")
    assert derive_bounds(records.load(results), bounds.steps, bounds.seeds) == bounds


def test_the_committed_run_is_whole():
    results = ACCURACY.parent / "results" / "dapo_small.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    steps: dict = {}
    for line in lines:
        steps.setdefault((line["arm"], line["seed"]), []).append(line["step"])
    assert {arm for arm, _ in steps} >= {BASELINE, CHECKED, "fp8_direct", "fp8_per_channel"}
    for key, found in steps.items():
        assert found == list(range(61)), key


def test_a_widened_product_and_its_gradients_are_bf16_s_but_for_one_rounding():
    from small_dapo.wide_products import WideProducts

    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48, bias=True, dtype=torch.bfloat16)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    out = torch.randn(5, 48, dtype=torch.bfloat16)

    def product_and_gradients(function):
        given = x.clone().requires_grad_()
        linear.zero_grad()
        made = function(given)
        made.backward(out)
        return made.detach(), given.grad, linear.weight.grad.clone(), linear.bias.grad.clone()

    native = product_and_gradients(linear)
    with WideProducts():
        wide = product_and_gradients(linear)
    for one, other in zip(native, wide, strict=True):
        assert one.dtype == other.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-6)


def test_a_nudged_start_differs_in_one_weight_and_bf16_sees_it():
    generator = torch.Generator().manual_seed(0)
    names = ("model.layers.0.mlp.down_proj.weight", "model.norm.weight")
    start = {name: torch.randn(4, 8, generator=generator) for name in names}
    found = nudged(start)
    for name, expected in ((names[0], 1), (names[1], 0)):
        assert int((found[name].bfloat16() != start[name].bfloat16()).sum()) == expected
        assert int((found[name] != start[name]).sum()) == expected


def test_the_page_says_how_far_the_arms_are_apart():
    runs = records.load(ACCURACY.parent / "results" / "dapo_small.jsonl")
    nudged = "fp8_blockwise_nudged"

    def apart(arms: set[str]) -> str:
        gaps = [
            late_accuracy(steps) - late_accuracy(runs[CHECKED, seed])
            for (arm, seed), steps in runs.items()
            if arm in arms
        ]
        return f"by {min(gaps):+.3f} to {max(gaps):+.3f}".replace("-", "−")

    others = {arm for arm, _ in runs} - {CHECKED, nudged}
    page = " ".join((ACCURACY / "README.md").read_text().split())
    assert f"{apart({nudged})}, the other arms {apart(others)}." in page
