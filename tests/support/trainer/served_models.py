"""Toy models of `transformers`, plans for them, and served weights by code that shares nothing with ours."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from sglang_fp8rl.lab.testing.checkpoints import make_state_dict
from sglang_fp8rl.lab.testing.families import hub_shapes, make_config
from sglang_fp8rl.trainer.served_weights import fingerprint_of_served
from sglang_fp8rl.wire.fingerprint import Fingerprint
from sglang_fp8rl.wire.plan import RefitPlan
from support.fused_experts import with_fused_experts
from support.plans import BLOCKWISE, PER_CHANNEL, PLAIN, make_plan

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 512
# Misaligned on the server, as their fused modules would be: one scale a row.
PER_ROW = re.compile(r"\.(k_proj|v_proj)\.weight$")
IN_FP8 = re.compile(r"\.(\w+_proj)\.weight$")
FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


def toy_model(family: str, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> nn.Module:
    """Seeded, of one layer."""
    config = make_config(family, num_hidden_layers=1, **overrides)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    found = model.load_state_dict(with_fused_experts(make_state_dict(config)), strict=False)
    assert found.missing_keys == ["lm_head.weight"] * config.tie_word_embeddings
    return model


def toy_plan(family: str, tp_size: int = 1, **overrides: Any) -> RefitPlan:
    """As a server with `tp_size` has it: down_proj is cut by columns, and `k_proj` has a scale a row."""
    options = {"use_weight_pow2_scale": overrides.pop("pow2", False)}
    shapes: dict[str, tuple[Any, ...]] = {}
    config = make_config(family, num_hidden_layers=1, **overrides)
    for name, shape in hub_shapes(config).items():
        if not IN_FP8.search(name):
            shapes[name] = (PLAIN, shape)
        elif "down_proj" in name and tp_size > 1:
            shapes[name] = (PER_CHANNEL, shape, shape[1] // tp_size)
        else:
            shapes[name] = (PER_CHANNEL if PER_ROW.search(name) else BLOCKWISE, shape)
    return make_plan(shapes, **options)


def independently_served(weight: torch.Tensor, block: tuple[int, int], pow2: bool) -> torch.Tensor:
    """One matrix, block by block, as the page on numerics says it."""
    served = torch.empty(weight.shape, dtype=torch.bfloat16)
    for row in range(0, weight.shape[0], block[0]):
        for column in range(0, weight.shape[1], block[1]):
            box = (slice(row, row + block[0]), slice(column, column + block[1]))
            values = weight[box].to(torch.bfloat16).double()
            scale = (values.abs().max().float() / 448.0).double()
            if pow2:
                scale = torch.exp2(torch.ceil(torch.log2(scale)))
            codes = (values.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            served[box] = (codes.float() * scale.float()).to(torch.bfloat16)
    return served


def with_served_parameters(model: nn.Module, plan: RefitPlan) -> nn.Module:
    """Change the parameters themselves: what the model then computes, and its gradients, are to be had."""
    pow2 = plan.rounding["pow2_scale"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if FUSED.search(name):
                part = "gate_proj" if "gate" in name else "down_proj"
                block = plan.of(f"{name.rpartition('.')[0]}.0.{part}.weight").block_size
                for expert in parameter:
                    for half in expert.chunk(2 if "gate" in name else 1):
                        half.copy_(independently_served(half, block, pow2))
            elif name in plan.tensors and plan.of(name).block_size is not None:
                block = plan.of(name).block_size
                parameter.copy_(independently_served(parameter, block, pow2))
    return model


def server_of(model: nn.Module, plan: RefitPlan, held: Fingerprint | None = None) -> Any:
    """What a proof asks of a `RefitClient`: of a server that holds what the model expects, or these bytes."""
    held = held or fingerprint_of_served(model)
    return SimpleNamespace(plan=lambda: plan, fingerprint=lambda: held)


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of a loss."""
    model.zero_grad()
    out = model(input_ids=TOKENS, labels=TOKENS, use_cache=False)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), grads
