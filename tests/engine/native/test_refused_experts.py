"""Experts in high precision are as sharply looked at as those in FP8."""

from __future__ import annotations

import pytest
from support.engine.commands import digests
from support.engine.options import EXPERTS, plain_experts
from support.engine.pool import on
from support.fused_experts import with_fused_experts

pytestmark = [
    pytest.mark.engine,
    on(plain_experts("tp1"), slow=(plain_experts("tp2"), plain_experts("ep2"))),
]


def half_of(weight, dim):
    return weight.narrow(dim, 0, weight.shape[dim] // 2).contiguous()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("leaf", ["gate_proj", "up_proj", "down_proj"])
def test_a_shard_of_an_expert_in_bf16_is_refused_by_name(host, leaf, dim):
    name = f"{EXPERTS}.0.{leaf}.weight"
    whole = host.model.second[name]
    words = f"the full, unsharded {tuple(whole.shape)}"
    host.refuses_and_keeps([(name, half_of(whole, dim))], name, words)


@pytest.mark.parametrize("leaf", ["gate_up_proj", "down_proj"])
def test_a_shard_of_all_experts_together_is_refused_by_name(host, leaf):
    name = f"{EXPERTS}.{leaf}"
    half = half_of(with_fused_experts(host.model.second)[name], 1)
    host.refuses_and_keeps([(name, half)], name)


def test_whole_experts_of_every_kind_equal_a_fresh_load(host):
    for weights in (host.model.second, host.model.first, with_fused_experts(host.model.second)):
        host.send(list(weights.items()))
    assert host.call_all(digests) == host.fresh("second").digests
