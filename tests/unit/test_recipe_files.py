"""The recipes of docs/recipes, as far as they run without a server: configurations, commands, what is missing."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import http_refit
import pytest
import slime_miles
import torch
import verl_fp8
from support.json_server import JsonServer

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


ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.engine_kwargs.sglang"


def composed(algorithm: str, *overrides: str):
    pytest.importorskip("verl")
    return verl_fp8.composed(algorithm, [MODEL, *MICRO, *overrides])


def test_what_the_recipe_reads_is_what_verl_runs_with():
    """As Hydra prints it for veRL's own program."""
    pytest.importorskip("verl")
    from omegaconf import OmegaConf

    overrides = [MODEL, f"++{ROLLOUT}.dtype=float16", f"+{ENGINE}.ep_size=2"]
    command = [*verl_fp8.command("dapo", overrides), "--cfg", "job"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    said = OmegaConf.create(done.stdout[done.stdout.index("actor_rollout_ref:") :])
    assert said.actor_rollout_ref == verl_fp8.composed("dapo", overrides).actor_rollout_ref


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_verl_takes_the_configuration_and_serves_by_this_method(name):
    config = composed(name, verl_fp8.ACTOR)
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    validate_config(config, use_reference_policy=False, use_critic=False)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.engine_kwargs["sglang"] == {"quantization": "fp8_blockwise_online"}
    assert (rollout.name, rollout.quantization) == ("sglang", None)
    filtered = omega_conf_to_dataclass(config.algorithm).filter_groups
    assert (filtered.enable, filtered.metric) == (name == "dapo", "reward")


def test_verl_s_dapo_reward_manager_reads_the_penalty():
    config = composed("dapo")
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager

    manager = DAPORewardManager(config, tokenizer=None, compute_score=lambda **_: 0.0)
    assert (manager.max_resp_len, manager.overlong_buffer_cfg.len) == (8192, 2048)


OPTIONS = """'{"quantization_config": {"use_weight_pow2_scale": true}}'"""
# How veRL is told of its servers, and what of it is not its default.
STARTED = {
    "veRL's defaults": ([], {}),
    "its own keys": (
        [f"{ROLLOUT}.tensor_model_parallel_size=4", f"{ROLLOUT}.expert_parallel_size=2",
         f"{ROLLOUT}.dtype=float16", "actor_rollout_ref.model.trust_remote_code=true"],
        {"tp_size": 4, "ep_size": 2, "dtype": "float16", "trust_remote_code": True},
    ),
    "keys with a plus": (
        [f"++{ROLLOUT}.tensor_model_parallel_size=1", f"+{ENGINE}.ep_size=8"],
        {"tp_size": 1, "ep_size": 8},
    ),
    "the method's options": (
        [f"+{ENGINE}.json_model_override_args={OPTIONS}"],
        {"options": {"use_weight_pow2_scale": True}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", STARTED)
def test_the_served_actor_gets_the_plan_of_the_servers_that_will_be_started(
    monkeypatch, tmp_path, how
):
    pytest.importorskip("verl")
    from sglang_fp8rl.lab import plan_offline

    asked = {}

    def make_plan(model, **options):
        asked.update(options, model=model)
        return type("Made", (), {"document": {"tensors": {}}})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_offline, "make_plan", make_plan)
    overrides, expected = STARTED[how]
    file = verl_fp8.write_plan("grpo", [MODEL, *overrides])
    default = {"tp_size": 2, "ep_size": 1, "dtype": "bfloat16", "trust_remote_code": False}
    assert asked == {"model": "model", "options": {}, **default, **expected}
    assert json.loads(file.read_text()) == {"tensors": {}}


@pytest.mark.parametrize(
    ("override", "name"),
    [
        (f"{ROLLOUT}.data_parallel_size=2", f"{ROLLOUT}.data_parallel_size"),
        (f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.quantization"),
        (f"{ROLLOUT}.disaggregation.enabled=true", f"{ROLLOUT}.disaggregation.enabled"),
        (f"+{ENGINE}.enable_dp_attention=true", f"{ENGINE}.enable_dp_attention"),
        (f"{ENGINE}.quantization=null", f"{ENGINE}.quantization"),
        (
            f"+{ENGINE}.json_model_override_args='{{\"num_hidden_layers\": 2}}'",
            f"{ENGINE}.json_model_override_args: num_hidden_layers",
        ),
    ],
)
def test_servers_that_the_recipe_can_t_plan_are_refused_by_name(override, name):
    with pytest.raises(SystemExit, match=f"error: --served: {re.escape(name)}[;, ]"):
        verl_fp8.servers(composed("grpo", override))


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
    for arguments in (["--hf-checkpoint", str(tmp_path)], [f"--hf-checkpoint={tmp_path}", "--x"]):
        with pytest.raises(SystemExit, match="the trainer would quantize before it sends"):
            slime_miles.check_checkpoint(arguments)
    (tmp_path / "config.json").write_text("{}")
    slime_miles.check_checkpoint(["--hf-checkpoint", str(tmp_path)])
    with pytest.raises(SystemExit, match="--hf-checkpoint MODEL is missing"):
        slime_miles.check_checkpoint([])


@pytest.mark.parametrize(
    "theirs", [["--sglang-quantization=fp8"], ["--sglang-quantization", "fp8"]]
)
def test_another_method_than_this_one_is_refused_and_not_overridden(monkeypatch, theirs):
    monkeypatch.setattr(slime_miles, "need", lambda *_: None)
    model = ["--hf-checkpoint", "model", "--sglang-quantization-param-path", "scales"]
    with pytest.raises(SystemExit, match=r"--sglang-quantization.*leave yours out"):
        slime_miles.main(["slime", "train.py", *model, *theirs])


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


def test_plain_http_takes_404_for_a_server_without_sessions_and_for_nothing_else():
    with NotFound() as server, pytest.raises(SystemExit, match="_from_tensor: HTTP 404"):
        http_refit.refit(server.url, [("a", torch.ones(4))])


class NotFound(JsonServer):
    def reply_to(self, path, body, headers):
        return (200, {"tp_size": 1}) if path == "/server_info" else (404, {"detail": "Not Found"})


def test_plain_http_tells_a_server_s_words_that_wants_a_key():
    with (
        WantsAKey() as server,
        pytest.raises(SystemExit, match=r"server_info: HTTP 401.*Unauthorized"),
    ):
        http_refit.refit(server.url, [("a", torch.ones(4))])


class WantsAKey(JsonServer):
    def reply_to(self, path, body, headers):
        return 401, {"error": "Unauthorized"}


def test_trl_s_recipe_says_that_no_server_answers_before_it_loads_a_model(monkeypatch):
    trl_grpo = importlib.import_module("trl_grpo")
    monkeypatch.setattr(trl_grpo, "need", lambda *_: None)
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(GRPOConfig=None, GRPOTrainer=None))
    with pytest.raises(SystemExit, match="no answer"):
        trl_grpo.main(["http://127.0.0.1:9", "model"])
