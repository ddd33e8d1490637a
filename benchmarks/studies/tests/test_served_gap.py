"""Trainers of `make served-gap`, its verdict, and the cast that shares nothing with the package's."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console
from studies.real_model.independent_gap import as_the_server, other_block, other_rounding
from studies.real_model.kept_activations import GROUPS
from studies.real_model.served_gap import ALL_SERVERS, report
from studies.real_model.served_trainers import PLAIN, QUANTIZED, SERVED, trainer
from support.trainer.served_models import TOKENS, toy_model, toy_plan
from verl_trainer.trainer_run import PLAN_FILE, SERVED_ACTOR, Arm, environment, overrides

from sglang_fp8rl.config import Options
from sglang_fp8rl.numerics import through_fp8


@pytest.mark.parametrize("shape", [(256, 128), (192, 384), (96, 576), (576, 1536)])
def test_the_independent_cast_is_the_package_s_and_the_wrong_ones_are_not(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    block = (128, 128) if shape[1] % 128 == 0 else (1, shape[1])
    assert torch.equal(as_the_server(weight), through_fp8(weight, block))
    for wrong in (other_block, other_rounding):
        assert not torch.equal(wrong(weight), as_the_server(weight))


def test_each_trainer_computes_something_else_and_the_model_is_its_own_afterwards():
    model, plan = toy_model("qwen3"), toy_plan("qwen3")
    found = {}
    with torch.no_grad():
        for name in (PLAIN, SERVED, QUANTIZED):
            with trainer(model, name, plan):
                found[name] = model(TOKENS).logits
        again = model(TOKENS).logits
    assert torch.equal(again, found[PLAIN])
    assert not torch.equal(found[SERVED], found[PLAIN])
    assert not torch.equal(found[QUANTIZED], found[SERVED])


@pytest.mark.parametrize(
    ("served", "both", "is_within"), [(0.4, 0.11, True), (0.6, 0.11, False), (0.4, 0.13, False)]
)
def test_the_verdict_is_by_both_bounds(served, both, is_within):
    k3 = {
        ("fp8_blockwise", PLAIN): 1.0,
        ("fp8_blockwise", SERVED): served,
        ("fp8_weights_only", SERVED): both,
        ("bf16", PLAIN): 0.1,
    }
    lines = [{"model": "m"}]
    for (server, name), value in k3.items():
        one = {"value": value, "low": value, "high": value}
        line = {"server": server, "trainer": name, "kl_k3": one, "mult_prob_error": one}
        lines.append({**line, "above_tis_cap": 0.0, "worst": 1.0, "tokens": 3, "tensors_proven": 0})
    console = Console(quiet=True)
    assert report(lines, console) == is_within


def test_groups_are_options_that_the_method_knows():
    for arm in GROUPS.values():
        Options.from_dict(arm.options)
    assert len(set(ALL_SERVERS)) == len(ALL_SERVERS)


def test_verl_s_actor_is_told_of_served_weights_where_the_arm_has_them(tmp_path):
    for served in (False, True):
        arm = Arm("an arm", served=served)
        lines = overrides(tmp_path, tmp_path, arm, steps=1, tp_size=1, out=tmp_path)
        assert any(SERVED_ACTOR in line for line in lines) == served
        assert (PLAN_FILE in environment(arm, tmp_path, 1)) == served
