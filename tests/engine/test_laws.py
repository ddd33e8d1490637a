"""Where engines go wrong, by bytes: single shards, single parts, sizes that fit at one TP only.

The laws that every model has to keep in every layout are in `test_contract.py`.
"""

from __future__ import annotations

import pytest
import torch
from support.by_definition import quantize_blockwise, quantize_per_channel
from support.engine.commands import digests, parameter, status
from support.engine.engine_host import EngineHost
from support.engine.models import MODELS, checkpoint
from support.engine.pool import engine_key, on, runs_on

pytestmark = pytest.mark.engine

# -- where the unmerged SGLang PR goes wrong ------------------------------------------------------


@on("qwen3-tp2")
def test_row_parallel_scales_are_refreshed_on_every_rank_at_tp2(host):
    name = "model.layers.0.mlp.down_proj"
    host.update_to("second")
    scales = host.call_all(parameter, f"{name}.weight_scale_inv")
    _, whole = quantize_blockwise(host.model.second[f"{name}.weight"])
    columns = whole.shape[1] // 2
    for rank, found in enumerate(scales):
        assert torch.equal(found, whole[:, rank * columns : (rank + 1) * columns]), rank


@on("qwen3-one-kv-head-tp1", "qwen3-one-kv-head-tp2")
def test_a_bucket_with_only_k_proj_changes_the_rows_of_k_and_no_others(host):
    model, tp_size = host.model, host.tp_size
    name = "model.layers.0.self_attn"
    codes, scales = f"{name}.qkv_proj.weight", f"{name}.qkv_proj.weight_scale_inv"
    before = host.call_all(parameter, codes), host.call_all(parameter, scales)
    key = f"{name}.k_proj.weight"
    host.send([(key, model.second[key])])
    after = host.call_all(parameter, codes), host.call_all(parameter, scales)
    reported = host.call(status)["problems"]
    q_rows = 256 // tp_size
    expected, expected_scale = quantize_blockwise(model.second[key])
    for rank in range(tp_size):
        old, new = before[0][rank], after[0][rank]
        assert torch.equal(new[q_rows : q_rows + 128], expected.view(torch.uint8))
        assert torch.equal(new[:q_rows], old[:q_rows])
        assert torch.equal(new[q_rows + 128 :], old[q_rows + 128 :])
        at = q_rows // 128
        assert torch.equal(after[1][rank][at : at + 1], expected_scale)
        assert torch.equal(after[1][rank][:at], before[1][rank][:at])
        assert torch.equal(after[1][rank][at + 1 :], before[1][rank][at + 1 :])
    assert any("qkv_proj.weight: only" in line for line in reported)


@on("qwen3-one-kv-head-tp2")
def test_with_more_ranks_than_kv_heads_every_rank_has_the_whole_head(host):
    model = host.model
    name = "model.layers.1.self_attn"
    host.send(list(model.second.items()))
    codes = host.call_all(parameter, f"{name}.qkv_proj.weight")
    scales = host.call_all(parameter, f"{name}.qkv_proj.weight_scale_inv")
    for part, row in (("k", 128), ("v", 256)):
        expected, scale = quantize_blockwise(model.second[f"{name}.{part}_proj.weight"])
        for rank in range(2):
            assert torch.equal(codes[rank][row : row + 128], expected.view(torch.uint8))
            assert torch.equal(scales[rank][row // 128 : row // 128 + 1], scale)


@runs_on("qwen3")
def test_a_model_may_be_misaligned_only_when_sharded_and_decides_alike_at_every_update(
    engine_pool,
):
    model = MODELS["qwen3"]
    plans = {}
    for tp_size in (1, 2):
        with engine_pool.lent(engine_key("qwen3", f"tp{tp_size}")) as host:
            before = host.call_all(status)
            # One tensor per call: a decision taken from the tensor at hand would differ.
            for item in model.second.items():
                host.send([item])
            assert [s["plan"] for s in host.call_all(status)] == [s["plan"] for s in before]
            plans[tp_size] = {e["module"]: e for e in before[0]["plan"]}
            if tp_size == 2:
                codes = host.call_all(parameter, "model.layers.0.self_attn.qkv_proj.weight")
    qkv = "model.layers.0.self_attn.qkv_proj"
    assert plans[1][qkv]["scheme"] == "blockwise"
    assert plans[2][qkv]["scheme"] == "per_channel"
    assert "64" in plans[2][qkv]["reason"]
    for rank in range(2):
        rows = model.second["model.layers.0.self_attn.k_proj.weight"][rank * 64 : rank * 64 + 64]
        expected, _ = quantize_per_channel(rows)
        assert torch.equal(codes[rank][128:192], expected.view(torch.uint8))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3", marks=runs_on("qwen3")),
        pytest.param("qwen2-bias", marks=[runs_on("qwen2-bias"), pytest.mark.slow]),
        pytest.param("llama", marks=[runs_on("llama"), pytest.mark.slow]),
    ],
)
def test_shards_are_slices_of_the_unsharded_bytes(engine_pool, name):
    keys = [engine_key(name, f"tp{ranks}") for ranks in (1, 2)]
    with engine_pool.lent(keys[0]) as one, engine_pool.lent(keys[1]) as two:
        for leaf, dim in (("mlp.down_proj", 1), ("self_attn.o_proj", 1)):
            for part in ("weight", "weight_scale_inv"):
                full = f"model.layers.0.{leaf}.{part}"
                whole = one.call(parameter, full)
                assert torch.equal(torch.cat(two.call_all(parameter, full), dim), whole)
        full = "model.layers.0.mlp.gate_up_proj.weight"
        gate, up = one.call(parameter, full).chunk(2)
        ranks = [found.chunk(2) for found in two.call_all(parameter, full)]
        assert torch.equal(torch.cat([rank[0] for rank in ranks]), gate)
        assert torch.equal(torch.cat([rank[1] for rank in ranks]), up)


# -- dtypes on disk, dummy ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_checkpoints_in_16_bit_and_in_shards_load_as_their_values(checkpoint_dir, dtype):
    model = MODELS["qwen3"]
    path = checkpoint(checkpoint_dir, model, "first", dtype=dtype, shards=3)
    with EngineHost(path) as host:
        found = host.call_all(digests)
        host.send([(name, weight.to(dtype).float()) for name, weight in model.first.items()])
        assert host.call_all(digests) == found


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
@runs_on("qwen3")
def test_dummy_weights_and_a_full_update_equal_a_fresh_load(checkpoint_dir, engine_pool, layout):
    key = engine_key("qwen3", layout)
    expected = engine_pool.fresh(key).digests
    path, args = checkpoint(checkpoint_dir, key.model, "first"), ("--load-format", "dummy")
    with EngineHost(path, tp_size=key.layout.tp_size, args=args) as host:
        state = host.call(status)
        assert not state["consistent"]
        assert "never loaded" in state["problems"][0]
        host.send(list(key.model.second.items()))
        assert host.call_all(digests) == expected
        assert host.call(status)["consistent"]
