"""A trainer's model computes with the bytes that the engine holds, and is nearer to it for that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.engine.commands import plan_document
from support.engine.fingerprint_commands import fingerprint, fingerprint_after_flip
from support.engine.generation import generate
from support.engine.pool import on
from support.fused_experts import with_fused_experts
from transformers import AutoModelForCausalLM

from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.trainer.served_weights import (
    check_as_served,
    compute_as_served,
    served_modules,
)
from sglang_fp8rl.wire.plan import RefitPlan

pytestmark = pytest.mark.engine

PROMPT = [3 + i * 37 % 500 for i in range(256)]


def trainer_model(host, which="first"):
    model = AutoModelForCausalLM.from_config(host.model.config, dtype=torch.bfloat16)
    found = model.load_state_dict(with_fused_experts(getattr(host.model, which)), strict=False)
    assert set(found.missing_keys) <= {"lm_head.weight"}
    return model


def server_of(host):
    """What a `RefitClient` asks, asked of the engine."""
    return SimpleNamespace(
        plan=lambda: RefitPlan.from_dict(host.call(plan_document)),
        fingerprint=lambda: host.call_all(fingerprint)[0],
    )


@torch.no_grad()
def log_probabilities(model):
    logits = model(input_ids=torch.tensor([PROMPT])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


@on("qwen3-tp1", "qwen3-moe-ep2", slow=("llama-misaligned-tp2", "qwen3-moe-misaligned-tp2"))
def test_a_model_that_computes_as_served_is_proven_and_nearer_to_the_engine(host):
    model, server = trainer_model(host), server_of(host)
    _, said = host.call_all(generate, PROMPT, 1)[0]
    said = torch.tensor(said[: len(PROMPT) - 1])
    plain = (log_probabilities(model) - said).square().mean()
    compute_as_served(model, server.plan())
    served = (log_probabilities(model) - said).square().mean()
    print(f"{host.key}: plain {plain:.6f}, served {served:.6f}")
    assert served < plain / 1.2

    found = check_as_served(model, server)
    assert not found.unproven
    assert found.compared > len(list(served_modules(model))) > 7

    # A step later the trainer is ahead, until the server has the weights.
    model.load_state_dict(with_fused_experts(host.model.second), strict=False)
    with pytest.raises(RefitError, match="have other bytes"):
        check_as_served(model, server)
    host.update_to("second")
    assert check_as_served(model, server).ok

    place = "model.layers.0.self_attn.o_proj.weight"
    answer = host.call_all(fingerprint_after_flip, 0, place, 17)[0]
    flipped = SimpleNamespace(plan=server.plan, fingerprint=lambda: answer)
    with pytest.raises(RefitError, match=r"o_proj\.weight: .*have other bytes"):
        check_as_served(model, flipped)
