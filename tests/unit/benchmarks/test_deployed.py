"""A policy as it is deployed: what is folded into BF16 is what its server holds."""

from __future__ import annotations

import pytest
import torch
from real_model.deployed import fold, held_out_sums
from safetensors.torch import load_file
from support.by_definition import quantize_blockwise

from sglang_fp8rl.lab.plan_offline import make_plan
from sglang_fp8rl.lab.testing.checkpoints import make_config, make_state_dict, save_checkpoint
from sglang_fp8rl.numerics import dequantize

pytestmark = pytest.mark.usefixtures("plans_in_forks")


def test_folded_weights_are_codes_times_scales_and_all_others_are_rounded(tmp_path):
    config = make_config("llama", num_hidden_layers=2)
    state = make_state_dict(config, seed=0)
    folder = save_checkpoint(tmp_path / "policy", config, state)
    fold(folder, make_plan(str(folder)), tmp_path / "folded")
    folded = load_file(tmp_path / "folded" / "model.safetensors")
    for name, weight in state.items():
        expected = weight.bfloat16()
        if name.endswith("_proj.weight"):
            expected = dequantize(*quantize_blockwise(weight))
        assert torch.equal(folded[name], expected), name


def test_every_sum_of_validation_is_there_once():
    problems = held_out_sums(lambda text: [ord(c) for c in text])
    assert len({(p.one, p.other) for p in problems}) == len(problems) == 80
    assert all(problem.is_held_out for problem in problems)
