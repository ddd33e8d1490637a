"""The recipes of docs/recipes, as far as they run without a server: configurations, commands, what is missing."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import slime_miles
import verl_fp8

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
MODEL = "actor_rollout_ref.model.path=model"
MICRO = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
]
# Of each recipe: how it is called, and the trainer that it runs.
TRAINERS = {
    "verl_fp8": (["grpo", MODEL], "verl"),
    "slime_miles": (["slime", "train.py", "--hf-checkpoint", "model"], "slime"),
    "areal_fp8": (["127.0.0.1:9", "--", "train"], "areal"),
    "trl_grpo": (["http://127.0.0.1:9", "model"], "trl"),
}


def composed(name: str, *overrides: str):
    """The configuration that `verl.trainer.main_ppo --config-dir … --config-name NAME` starts with."""
    pytest.importorskip("verl")
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(RECIPES), version_base=None):
        search = "hydra.searchpath=[pkg://verl.trainer.config]"
        return compose(name, overrides=[search, MODEL, *MICRO, *overrides])


@pytest.mark.parametrize("name", ["verl_grpo", "verl_dapo"])
def test_verl_takes_the_configuration_and_serves_by_this_method(name):
    config = composed(name, verl_fp8.ACTOR)
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    validate_config(config, use_reference_policy=False, use_critic=False)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.engine_kwargs["sglang"] == {"quantization": "fp8_blockwise_online"}
    assert (rollout.name, rollout.quantization) == ("sglang", None)
    filtered = omega_conf_to_dataclass(config.algorithm).filter_groups
    assert (filtered.enable, filtered.metric) == (name == "verl_dapo", "reward")


def test_verl_s_dapo_reward_manager_reads_the_penalty():
    config = composed("verl_dapo")
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager

    manager = DAPORewardManager(config, tokenizer=None, compute_score=lambda **_: 0.0)
    assert (manager.max_resp_len, manager.overlong_buffer_cfg.len) == (8192, 2048)


def test_the_served_actor_gets_the_plan_of_the_servers_that_will_be_started(monkeypatch, tmp_path):
    from sglang_fp8rl.lab import plan_offline

    asked = {}

    def make_plan(model, **options):
        asked.update(options, model=model)
        return type("Made", (), {"document": {"tensors": {}}})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_offline, "make_plan", make_plan)
    file = verl_fp8.write_plan([MODEL, f"{verl_fp8.RANKS}=4"])
    assert asked == {"model": "model", "tp_size": 4, "dtype": "bfloat16"}
    assert json.loads(file.read_text()) == {"tensors": {}}


@pytest.mark.parametrize("recipe", TRAINERS)
def test_a_recipe_without_its_trainer_says_what_to_install(monkeypatch, recipe):
    arguments, trainer = TRAINERS[recipe]
    module, find = importlib.import_module(recipe), importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == trainer else find(name)
    )
    with pytest.raises(SystemExit, match=f"error: {trainer} is not installed.* Install: "):
        module.main(arguments)


@pytest.mark.parametrize("recipe", TRAINERS)
def test_a_recipe_without_arguments_says_how_it_is_called(monkeypatch, recipe):
    module = importlib.import_module(recipe)
    monkeypatch.setattr(module, "need", lambda *_: None)
    with pytest.raises(SystemExit, match=f"usage: {recipe}.py "):
        module.main([])


def test_a_checkpoint_by_which_slime_and_miles_would_quantize_is_refused(tmp_path):
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="the trainer would quantize before it sends"):
        slime_miles.check_checkpoint(["--hf-checkpoint", str(tmp_path)])
    (tmp_path / "config.json").write_text("{}")
    slime_miles.check_checkpoint(["--hf-checkpoint", str(tmp_path)])
    with pytest.raises(SystemExit, match="--hf-checkpoint MODEL is missing"):
        slime_miles.check_checkpoint([])


# As their own programs: SGLang's parser behind a prefix in the driver, and its `ServerArgs` in an actor of Ray's.
TRAIN = """
import argparse, sys
import ray
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
arguments = [one.replace("--sglang-", "--") for one in sys.argv[3:]]
said = parser.parse_args(["--model-path", sys.argv[2], *arguments])

@ray.remote
def quantization():
    from sglang.srt.server_args import QUANTIZATION_CHOICES
    return said.quantization in QUANTIZATION_CHOICES

print("known to the driver and to an actor:", ray.get(quantization.remote()))
"""


@pytest.mark.slow
def test_slime_s_driver_and_its_actors_know_the_method(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime/__init__.py").touch()
    (tmp_path / "train.py").write_text(TRAIN)
    command = [RECIPES / "slime_miles.py", "slime", "train.py", "--hf-checkpoint", tmp_path]
    env = {**os.environ, "SGLANG_PLATFORM": "fp8rl_cpu", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert "known to the driver and to an actor: True" in done.stdout, done.stderr[-2000:]
