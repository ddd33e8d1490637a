"""A run: what it finds, what it keeps when it is cut off, what it chooses, what it refuses."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from support.eval.sensitivity_model import PROMPTS, small_model, small_plan, small_weights

from sglang_fp8rl.errors import EvaluationError
from sglang_fp8rl.lab.sensitivity.finding import effects_of, finding_of
from sglang_fp8rl.lab.sensitivity.measure import Measurement, Settings, key_of
from sglang_fp8rl.lab.sensitivity.quantized_products import Operand
from sglang_fp8rl.lab.sensitivity.reference import reference_of
from sglang_fp8rl.lab.sensitivity.results_file import ResultsFile, check_place
from sglang_fp8rl.lab.sensitivity.samples import Groups, ratio
from sglang_fp8rl.lab.sensitivity.served_modules import (
    Choice,
    choose,
    savings,
    served_modules,
    share_left,
)

PLANTED = "model.layers.1.mlp.down_proj"
SETTINGS = Settings(new_tokens=6, samples=2)
KEY = {"model": "m"}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """In each block of one module a single value is so large that the others get few codes.

    The inputs that meet it are 0: the clean model does not use it, and its block's scale does.
    """
    weights = small_weights()
    dead = "model.layers.1.mlp.up_proj.weight"
    weights[dead][0::128] = 0
    weights[f"{PLANTED}.weight"][0::128, 0::128] = 1e6
    plan = small_plan()
    model = small_model(weights, tmp=tmp_path_factory.mktemp("planted"))
    modules = served_modules(plan)
    return reference_of(model, plan, modules), plan, modules


class Cut(Exception):
    """The run ends here."""


def measure(planted, path, stop_after=None, run_settings=SETTINGS):
    """All effects, everything, and the names that were measured now; cut off after some steps."""
    reference, _, _ = planted
    steps = []

    def count(name):
        steps.append(name)
        if stop_after is not None and len(steps) == stop_after:
            raise Cut

    key = key_of(reference, PROMPTS, run_settings)
    with closing(ResultsFile(path, key)) as results:
        run = Measurement(reference, results, run_settings, count)
        run.draw_samples(PROMPTS)
        run.measure_effects()
        run.all_but(())
        return results.known, steps


@pytest.fixture(scope="module")
def whole(planted, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "results.jsonl"
    known, _ = measure(planted, path)
    return path, known


def test_a_planted_module_is_found_first(planted, whole):
    _, _, modules = planted
    effects = effects_of(modules, whole[1], Groups(whole[1].samples))
    assert max(effects, key=effects.get) == PLANTED
    cheapest = min(module.extra_bytes for module in modules)
    planted_bytes = next(one.extra_bytes for one in modules if one.name == PLANTED)
    choice = choose(modules, effects, planted_bytes + cheapest)
    assert choice.names[0] == PLANTED
    # The weight's SQNR does not see it: the large values are exact.
    fits = whole[1].fits
    assert max(fits, key=lambda name: fits[name].weight_db) == PLANTED


def test_the_sum_of_effects_predicts_what_the_choice_brings(planted, whole, tmp_path):
    """In so shallow a model they add up; the share that is left is measured, not taken from the sum."""
    reference, plan, modules = planted
    path = tmp_path / "results.jsonl"
    path.write_text(whole[0].read_text())
    with closing(ResultsFile(path, key_of(reference, PROMPTS, SETTINGS))) as results:
        run = Measurement(reference, results, SETTINGS)
        effects = effects_of(modules, results.known, Groups(results.known.samples))
        choice = choose(modules, effects, savings(modules) // 4)
        run.all_but(choice.names)
        finding = finding_of(modules, plan, results.known, choice)
    check = finding.checks["chosen_on"]
    assert finding.holds
    assert set(finding.checks) == {"chosen_on", "held_out"}
    assert 0.7 < check.additivity < 1.3
    assert check.share.value == pytest.approx(check.predicted_share, abs=0.15)
    assert check.chosen.value < check.everything.value
    assert check.predicted_share == pytest.approx(share_left(effects, choice.names))
    assert finding.options == {"ignored_layers": list(choice.names)}
    assert json.loads(json.dumps(finding.as_dict()))["choice"]["extra_bytes"] == choice.extra_bytes


def test_a_choice_that_brings_nothing_is_told(planted, whole):
    _, plan, modules = planted
    known = replace(whole[1], sets=dict(whole[1].sets))
    effects = effects_of(modules, known, Groups(known.samples))
    choice = choose(modules, effects, savings(modules) // 4)
    known.sets[tuple(sorted(choice.names))] = known.sets[()]
    assert not finding_of(modules, plan, known, choice).holds


@pytest.mark.parametrize("stop_after", [1, 5, 7, 11, 18])
def test_an_interrupted_run_goes_on_to_the_same_measurements(planted, whole, tmp_path, stop_after):
    path = tmp_path / "results.jsonl"
    with pytest.raises(Cut):
        measure(planted, path, stop_after)
    kept = path.read_text().splitlines()
    known, steps = measure(planted, path)
    assert known == whole[1]
    assert path.read_text().splitlines()[: len(kept)] == kept
    measured = sum('"effect"' in line for line in kept)
    assert sum(step.startswith("model.") for step in steps) == len(known.effects) - measured


@pytest.mark.parametrize("part", [0.02, 0.4, 0.77, 0.999])
def test_half_a_line_of_a_killed_run_is_measured_again(planted, whole, tmp_path, part):
    path = tmp_path / "results.jsonl"
    content = whole[0].read_bytes()
    path.write_bytes(content[: int(part * len(content))].removesuffix(b"\n"))
    assert not path.read_bytes().endswith(b"\n")
    assert measure(planted, path)[0] == whole[1]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_run_killed_between_two_answers_to_a_prompt_keeps_the_first(planted, whole, tmp_path):
    path = tmp_path / "results.jsonl"
    lines = whole[0].read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]))  # the run, both answers to a prompt, one to the next
    known, _ = measure(planted, path)
    assert known == whole[1]
    assert path.read_bytes().splitlines()[:4] == b"".join(lines[:4]).splitlines()


def test_weights_and_inputs_alone_are_added_to_what_was_measured(planted, whole, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(whole[0].read_text())
    known, steps = measure(planted, path, run_settings=replace(SETTINGS, by_operand=True))
    assert len(known.effects) == 3 * len(whole[1].effects)
    assert sum(step.startswith("model.") for step in steps) == 2 * len(whole[1].effects)
    weights, inputs = (sum(known.effects[PLANTED, one]) for one in list(Operand)[1:])
    assert weights > 2 * inputs


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model": "other"}, "measured with model 'm', now it is 'other'"),
        ({"model": "m", "seed": 1}, "measured with seed None, now it is 1"),
    ],
)
def test_measurements_of_another_run_don_t_mix(tmp_path, other, message):
    path = tmp_path / "results.jsonl"
    ResultsFile(path, KEY).close()
    before = path.read_text()
    with pytest.raises(EvaluationError, match=message):
        ResultsFile(path, other)
    assert path.read_text() == before
    ResultsFile(path, KEY).close()
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"row": "else"}\n', "begins with"),
        ("no json\n", r"results.jsonl begins with 'no json"),
        ("notes, no newline", "begins with 'notes"),
        ('{\n  "of": "another program"\n}', "begins with"),
        (
            '{"row": "run", "format": "sglang-fp8rl/sensitivity", "version": 9, "key": {}}\n',
            "version",
        ),
        (b"\xff\xfe\n", "JSON lines"),
    ],
)
def test_a_file_that_holds_something_else_is_left_alone(tmp_path, content, message):
    path = tmp_path / "results.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(EvaluationError, match=message):
        ResultsFile(path, KEY)
    with pytest.raises(EvaluationError, match=message):
        check_place(path)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("line", ["half a sam", '{"row": "sample"}', '{"row": "fit", "module": 1}'])
def test_a_broken_line_is_not_said_to_be_of_no_consequence(tmp_path, line):
    path = tmp_path / "results.jsonl"
    ResultsFile(path, KEY).close()
    path.write_text(path.read_text() + line + "\n" + '{"row": "sample"}\n')
    with pytest.raises(EvaluationError, match=r"results.jsonl:2: .*Delete it and all behind it"):
        ResultsFile(path, KEY)


def test_a_place_that_can_t_be_written_is_named(tmp_path):
    with pytest.raises(EvaluationError, match="no-such-folder"):
        ResultsFile(tmp_path / "no-such-folder" / "a.jsonl", KEY)


def test_errors_of_ratios_are_those_of_repeated_draws():
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(400):
        tokens = torch.randint(5, 50, (24,), generator=generator).double()
        sums = tokens * (1 + 0.3 * torch.randn(24, generator=generator).double())
        drawn.append(ratio(sums.tolist(), tokens.tolist()))
    values = torch.tensor([one.value for one in drawn])
    mean_error = sum(one.error for one in drawn) / len(drawn)
    assert values.mean() == pytest.approx(1.0, abs=0.02)
    assert mean_error == pytest.approx(float(values.std()), rel=0.15)


def test_a_ratio_of_nothing_is_no_number():
    found = ratio([0.0, 0.0], [0.0, 0.0])
    assert math.isnan(found.value)
    assert math.isnan(found.error)


def test_operands_are_looked_at_without_the_filling_of_a_batch(planted, tmp_path):
    reference, _, _ = planted
    fits = []
    for tokens_at_once in (1, 10_000):
        settings = replace(SETTINGS, new_tokens=0, tokens_at_once=tokens_at_once)
        path = tmp_path / f"{tokens_at_once}.jsonl"
        with closing(ResultsFile(path, key_of(reference, PROMPTS, settings))) as results:
            run = Measurement(reference, results, settings)
            run.draw_samples(PROMPTS)
            run.all_but(())
            fits.append(results.known.fits)
    assert fits[0] == fits[1]


def test_prompts_held_out_have_no_say(planted, whole):
    _, _, modules = planted
    groups = Groups(whole[1].samples)
    assert (len(groups.chosen_on), len(groups.held_out)) == (5, 1)
    changed = replace(whole[1], effects=dict(whole[1].effects))
    name = modules[0].name
    sums = list(changed.effects[name, Operand.BOTH])
    prompt = PROMPTS[3]  # every fourth
    for at, sample in enumerate(whole[1].samples):
        if list(sample.prompt) == prompt:
            sums[at] = 1e6
    changed.effects[name, Operand.BOTH] = sums
    assert effects_of(modules, changed, groups) == effects_of(modules, whole[1], groups)
    assert Choice((), 0, 1.0).names == ()
