"""`python served_ranks.py` with RANK and WORLD_SIZE: what `test_served_weights_ranks` runs on two ranks."""

from __future__ import annotations

import copy
import json

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from sglang_fp8rl.trainer.served_weights import (
    check_as_served,
    compute_as_served,
    compute_as_stored,
    fingerprint_of_served,
)
from support.trainer.served_models import TOKENS, server_of, toy_model, toy_plan

FAMILY = "qwen3_moe"


def gradients(model, tokens):
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def expected_gradients(masters, plan):
    """Of one process, for each rank's tokens, and their mean."""
    model = copy.deepcopy(masters)
    for parameter in model.parameters():  # and no buffer, as FSDP2
        parameter.data = parameter.data.bfloat16()
    compute_as_served(model, plan)
    halves = []
    for tokens in TOKENS.split(1):
        grads = gradients(model, tokens)
        halves.append({name: grad.float() for name, grad in grads.items()})
    return {name: (halves[0].get(name, 0) + half) / 2 for name, half in halves[1].items()}


def shard(model, mesh):
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for layer in model.model.layers:
        fully_shard(layer.self_attn.o_proj, **options)  # swapped modules by themselves
        fully_shard(layer.mlp.experts, **options)
        fully_shard(layer, **options)
    fully_shard(model, **options)


def check(swapped_first: bool, checkpointing: bool, mesh) -> None:
    masters, plan = toy_model(FAMILY, torch.float32), toy_plan(FAMILY, 2)
    one = copy.deepcopy(masters)
    compute_as_served(one, plan)
    held = fingerprint_of_served(one)
    expected, model = expected_gradients(masters, plan), copy.deepcopy(masters)
    names = list(model.state_dict())
    if swapped_first:
        compute_as_served(model, plan)
    shard(model, mesh)
    if not swapped_first:
        compute_as_served(model, plan)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    assert list(model.state_dict()) == names
    for _ in range(2):
        found = gradients(model, TOKENS.split(1)[mesh.get_local_rank()])
        assert found.keys() == expected.keys()
        for name, grad in found.items():
            torch.testing.assert_close(
                grad.full_tensor(),
                expected[name],
                rtol=1e-6,
                atol=1e-9,
                msg=lambda text, name=name: name + text,
            )
    assert check_as_served(model, server_of(model, plan, held)).compared == len(held.numbers)
    compute_as_stored(model)
    o_proj = model.model.layers[0].self_attn.o_proj
    assert isinstance(o_proj, FSDPModule)
    assert isinstance(o_proj, nn.Linear)
    assert not hasattr(type(o_proj), "stored_class")
    plain = gradients(model, TOKENS[:1])
    assert any(not torch.equal(grad.full_tensor(), expected[name]) for name, grad in plain.items())


def main() -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    for swapped_first, checkpointing in ((True, False), (False, True)):
        check(swapped_first, checkpointing, mesh)
    if torch.distributed.get_rank() == 0:
        print(json.dumps("as one process"), flush=True)
    torch.distributed.destroy_process_group()


main()
