"""Who quantizes doesn't matter: by the plan on the trainer, or by the engine, the bytes are one."""

from __future__ import annotations

import random

import jsonschema
import pytest
import torch
from support.engine.commands import digests, plan_document, status, stored
from support.engine.contract import DEFAULT, HOST, OLDEST
from support.engine.models import MODELS
from support.engine.pool import as_param, on
from support.fused_experts import with_fused_experts
from support.plans import plan_schema

from sglang_fp8rl.trainer import WireStats, quantize_for_refit
from sglang_fp8rl.wire.plan import RefitPlan

pytestmark = pytest.mark.engine

REFUSED = {"gpt-oss"}


if HOST == OLDEST:
    REFUSED = {*REFUSED, "deepseek-misaligned"}  # see `contract.BLOCKS_ONLY`
CASES = [f"{name}-tp{ranks}" for name in MODELS for ranks in (1, 2) if name not in REFUSED]
on_every_model = pytest.mark.parametrize(
    "host",
    [as_param(case, *([] if case in DEFAULT else [pytest.mark.slow])) for case in CASES],
    indirect=True,
)


@on_every_model
def test_quantized_by_the_trainer_or_the_engine_the_bytes_are_one(host):
    model = host.model
    host.update_to("second")
    engine_made = host.call_all(digests)
    host.update_to("first")
    found, stats = RefitPlan.from_dict(host.call(plan_document)), WireStats()
    items = list(quantize_for_refit(model.second.items(), found, stats=stats))
    random.Random(0).shuffle(items)  # a scale may come before its weight
    host.send(items)
    assert host.call_all(digests) == engine_made
    assert host.call(status)["consistent"]
    assert stats.nbytes == sum(tensor.nbytes for _, tensor in items)
    assert stats.quantized == sum(tensor.dtype is torch.float8_e4m3fn for _, tensor in items) > 0


@on("qwen3-moe-ep2", slow=("qwen3-moe-tp1",))
def test_fused_experts_of_the_trainer_are_those_of_the_plan(host):
    found = RefitPlan.from_dict(host.call(plan_document))
    fused = with_fused_experts(host.model.second)
    host.send(list(quantize_for_refit(fused.items(), found)))
    assert host.call_all(digests) == host.fresh("second").digests


@on_every_model
def test_every_rank_gives_one_document_and_it_is_what_the_parameters_are(host):
    model, document = host.model, host.call(plan_document)
    jsonschema.Draft202012Validator(plan_schema()).validate(document)
    assert all(other == document for other in host.call_all(plan_document))
    found, parameters = RefitPlan.from_dict(document), host.call(stored)
    needed = {name for name in model.first if not found.why_not_needed(name)}
    assert set(found.tensors) == needed
    for name, entry in found.tensors.items():
        assert entry.shape == tuple(model.first[name].shape)
        # SGLang's own prefix, as `ignored_layers` takes it: Mixtral's and Qwen3-VL's begin otherwise
        # than the path of the parameter.
        inner = entry.module[max(entry.module.find("layers."), 0) :]
        held = {
            leaf: dtype for leaf, (dtype, _) in parameters.items() if f".{inner}." in f".{leaf}"
        }
        blocks = any(leaf.endswith("weight_scale_inv") for leaf in held)
        rows = any(leaf.endswith("weight_scale") for leaf in held)
        if not name.endswith(".weight") or not (blocks or rows):
            assert entry.scheme == "high_precision"
            assert entry.dtype in held.values()
        else:
            assert entry.scheme == ("blockwise" if blocks else "per_channel")
            assert "float8_e4m3fn" in held.values()
        assert entry.is_fp8_on_wire == bool(entry.scale_name)
        assert bool(entry.reason) == (not entry.is_fp8_on_wire)


@on_every_model
def test_per_channel_stays_unquantized_on_the_wire_where_ranks_have_scales_of_their_own(host):
    for name, entry in RefitPlan.from_dict(host.call(plan_document)).tensors.items():
        row_parallel = name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight"))
        if entry.scheme != "per_channel":
            continue
        assert entry.is_fp8_on_wire == (host.tp_size == 1 or not row_parallel), name
        assert entry.is_fp8_on_wire or "row-parallel" in entry.reason
