"""`python verl_actor.py DIRECTORY` as rank 0 of 1: veRL's FSDP engines as actor, reference and another model."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from byte_tokenizer import save_tokenizer
from torch.distributed.fsdp import OffloadPolicy
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.lab.testing.checkpoints import make_checkpoint
from sglang_fp8rl.trainer.served_weights import plan_of, served_modules
from support.trainer.served_models import toy_plan

LIBRARY = "sglang_fp8rl.verl_rollout.served_actor"
TOKENS = torch.arange(12)[None]


# veRL keeps a reference in pinned memory, which a machine without a GPU has not.
transformer_impl.CPUOffloadPolicy = lambda **_: OffloadPolicy()


def engine_of(path: Path, *, strategy="fsdp2", external_lib=None, forward_only=False):
    model = HFModelConfig(
        path=str(path),
        external_lib=external_lib,
        use_remove_padding=False,
        override_config={"attn_implementation": "eager"},
    )
    options = {"strategy": strategy, "use_torch_compile": False, "model_dtype": "fp32"}
    engine = FSDPEngineWithLMHead(
        model,
        FSDPEngineConfig(forward_only=forward_only, **options),
        FSDPOptimizerConfig(lr=1e-3),
        None,
    )
    engine._build_model_optimizer()
    return engine


def logits(engine):
    with torch.no_grad():
        return engine.module(input_ids=TOKENS, use_cache=False).logits


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    path = Path(sys.argv[1]) / "model"
    save_tokenizer(path)
    make_checkpoint(path, "qwen3", num_hidden_layers=1)
    plan = toy_plan("qwen3")
    file = Path(sys.argv[1]) / "plan.json"
    file.write_text(json.dumps(plan.as_dict()))

    other = engine_of(path)  # before the module is imported
    with pytest.raises(ConfigError, match="SGLANG_FP8RL_SERVED_PLAN"):
        engine_of(path, external_lib=LIBRARY)
    os.environ["SGLANG_FP8RL_SERVED_PLAN"] = str(file)
    actor = engine_of(path, external_lib=[LIBRARY])
    reference = engine_of(path, external_lib=LIBRARY, forward_only=True)
    later = engine_of(path)
    assert plan_of(actor.module).digest == plan.digest
    assert len(list(served_modules(actor.module))) == 7
    for plain in (reference, later):
        assert not list(served_modules(plain.module))
        assert torch.equal(logits(plain), logits(other))
    before = copy.deepcopy(logits(actor))
    assert not torch.equal(before, logits(other))
    actor.module(input_ids=TOKENS, use_cache=False).logits.float().square().mean().backward()
    assert actor.optimizer_step() > 0
    assert not torch.equal(logits(actor), before)
    sent, _ = actor.get_per_tensor_param()
    assert {name for name, _ in sent} == set(plan.tensors)
    print(json.dumps("the actor alone"), flush=True)
    torch.distributed.destroy_process_group()


main()
