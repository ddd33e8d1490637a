"""The laws, by bytes, on real schedulers: one at TP=1, two at TP=2."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from commands import (
    addresses,
    begin,
    digests,
    end,
    parameter,
    status,
    update,
    update_from_disk,
)
from engine_host import EngineHost
from models import MODELS, checkpoint

from sglang_fp8rl.numerics import quantize_blockwise, quantize_per_channel
from sglang_fp8rl.testing.checkpoints import quantized

pytestmark = pytest.mark.engine

CASES = [
    ("qwen3", 1),
    ("qwen3", 2),
    ("qwen2-bias", 1),
    ("qwen2-bias", 2),
    ("llama", 1),
    ("qwen3-tied", 1),
    ("qwen3-one-kv-head", 2),
    ("llama-misaligned", 1),
    ("llama-misaligned", 2),
    ("qwen3-moe", 1),
    ("qwen3-moe", 2),
    ("mixtral", 2),
    ("qwen3-moe-misaligned", 2),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-tp{case[1]}")
def case(request, checkpoint_dir):
    """A running engine on the first weights, and what a fresh one has on either."""
    name, tp_size = request.param
    model = MODELS[name]
    with EngineHost(checkpoint(checkpoint_dir, model, "second"), tp_size=tp_size) as fresh:
        second = fresh.call_all(digests)
        plan = fresh.call_all(status)
    with EngineHost(checkpoint(checkpoint_dir, model, "first"), tp_size=tp_size) as host:
        yield Case(model, host, host.call_all(digests), second, plan)


class Case:
    def __init__(self, model, host, first, second, fresh_status):
        self.model, self.host = model, host
        self.fresh = {"first": first, "second": second}
        self.fresh_status = fresh_status

    def send(self, which, buckets=None, **options):
        """Update to one of the weight sets and check that it was taken."""
        state = getattr(self.model, which)
        for bucket in buckets or [list(state)]:
            tensors = [(name, state[name]) for name in bucket]
            for success, message in self.host.call_all(update, tensors, *options.values()):
                assert success, message

    def check(self, which):
        for rank, found in enumerate(self.host.call_all(digests)):
            wrong = [name for name in found if found[name] != self.fresh[which][rank][name]]
            assert not wrong, (rank, wrong)
        state = self.host.call(status)
        assert state["consistent"], state["problems"]


def shuffled_buckets(names, seed, sizes):
    names, generator = list(names), random.Random(seed)
    generator.shuffle(names)
    while names:
        size = generator.choice(sizes)
        yield names[:size]
        names = names[size:]


def test_the_two_weight_sets_differ_in_every_quantized_parameter(case):
    """Or the other tests would prove nothing."""
    for first, second in zip(case.fresh["first"], case.fresh["second"], strict=True):
        assert all(first[name] != second[name] for name in first if name.endswith("proj.weight"))


def test_refit_equals_fresh_load_again_and_again(case):
    for which in ("second", "first", "second", "first"):
        case.send(which)
        case.check(which)


def test_buckets_of_any_size_and_order_give_the_same_bytes(case):
    for seed, sizes in enumerate([(1,), (1, 2, 3, 7), (11,)]):
        which = ("second", "first")[seed % 2]
        case.send(which, shuffled_buckets(getattr(case.model, which), seed, sizes))
        case.check(which)
    case.send("second")
    case.send("first", load_format="flattened_bucket")
    case.check("first")


def test_addresses_stay(case):
    before = case.host.call_all(addresses)
    case.send("second")
    case.send("first", shuffled_buckets(case.model.first, 5, (3,)))
    assert case.host.call_all(addresses) == before


def test_the_scheme_is_decided_once(case):
    before = [rank["plan"] for rank in case.host.call_all(status)]
    assert before == [rank["plan"] for rank in case.fresh_status]
    case.send("second", shuffled_buckets(case.model.second, 3, (1,)))
    assert [rank["plan"] for rank in case.host.call_all(status)] == before
    case.send("first")


def test_bf16_and_fp16_sources_give_the_bytes_of_their_bf16_rounding(case):
    for dtype in (torch.bfloat16, torch.float16):
        rounded = {name: w.to(dtype) for name, w in case.model.first.items()}
        assert case.host.call(update, list(rounded.items()))[0] if case.host.tp_size == 1 else True
        if case.host.tp_size > 1:
            assert all(ok for ok, _ in case.host.call_all(update, list(rounded.items())))
        found = case.host.call_all(digests)
        widened = [(name, w.float()) for name, w in rounded.items()]
        assert all(ok for ok, _ in case.host.call_all(update, widened))
        assert case.host.call_all(digests) == found
        if dtype is torch.bfloat16:
            case.check("first")
    case.send("first")


def test_the_engine_and_the_trainer_quantize_to_the_same_bytes(case):
    """FP8 with its scale passes through, split for each rank."""
    if case.host.tp_size == 2 and any(
        entry["scheme"] == "per_channel" for entry in case.host.call(status)["plan"]
    ):
        pytest.skip("a row scale of the whole matrix is not the scale of a shard's row")
    schemes = {entry["module"]: entry["scheme"] for entry in case.host.call(status)["plan"]}
    sent = {}
    for name, weight in case.model.second.items():
        scheme = schemes.get(fused_module_of(name))
        if scheme == "blockwise" and name.endswith(".weight"):
            sent[name], sent[f"{name}_scale_inv"] = quantize_blockwise(weight)
        elif scheme == "per_channel" and name.endswith(".weight"):
            sent[name], sent[f"{name}_scale"] = quantize_per_channel(weight)
        else:
            sent[name] = weight
    items = list(sent.items())
    random.Random(0).shuffle(items)  # a scale may come before its weight
    for success, message in case.host.call_all(update, items):
        assert success, message
    case.check("second")
    case.send("first")


def fused_module_of(name):
    module = name.removesuffix(".weight")
    for part, fused in (
        ("q", "qkv"),
        ("k", "qkv"),
        ("v", "qkv"),
        ("gate", "gate_up"),
        ("up", "gate_up"),
    ):
        if module.endswith(f".{part}_proj"):
            return module.removesuffix(f"{part}_proj") + f"{fused}_proj"
    return module


def test_a_session_of_buckets_equals_one_call(case):
    if not hasattr_begin(case):
        pytest.skip("this SGLang has no sessions")
    assert all(ok for ok, _ in case.host.call_all(begin))
    assert not case.host.call(status)["consistent"]
    case.send("second", shuffled_buckets(case.model.second, 9, (4,)))
    assert all(ok for ok, _ in case.host.call_all(end))
    case.check("second")
    # A second session with nothing in common is another refit, whatever came before.
    assert all(ok for ok, _ in case.host.call_all(begin))
    name = next(name for name in case.model.first if name.endswith("norm.weight"))
    case.send("second", [[name]])
    assert all(ok for ok, _ in case.host.call_all(end))
    assert case.host.call(status)["last_refit"]["tensors"] == 1
    case.send("first")


def hasattr_begin(case):
    from importlib.metadata import version

    from packaging.version import Version

    return Version(version("sglang")) >= Version("0.5.21")


def test_update_from_disk_equals_fresh_load(case, checkpoint_dir):
    for which in ("second", "first"):
        path = str(checkpoint(checkpoint_dir, case.model, which))
        for success, message in case.host.call_all(update_from_disk, path):
            assert success, message
        case.check(which)


# -- where the unmerged SGLang PR goes wrong ------------------------------------------------------


def host_of(checkpoint_dir, name, tp_size, which="first", **options) -> EngineHost:
    path = checkpoint(checkpoint_dir, MODELS[name], which)
    return EngineHost(path, tp_size=tp_size, **options)


def test_row_parallel_scales_are_refreshed_on_every_rank_at_tp2(checkpoint_dir):
    model = MODELS["qwen3"]
    with host_of(checkpoint_dir, "qwen3", 2) as host:
        name = "model.layers.0.mlp.down_proj"
        assert all(ok for ok, _ in host.call_all(update, list(model.second.items())))
        scales = host.call_all(parameter, f"{name}.weight_scale_inv")
    _, whole = quantize_blockwise(model.second[f"{name}.weight"])
    columns = whole.shape[1] // 2
    for rank, found in enumerate(scales):
        assert torch.equal(found, whole[:, rank * columns : (rank + 1) * columns]), rank


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_bucket_with_only_k_proj_changes_the_rows_of_k_and_no_others(checkpoint_dir, tp_size):
    model = MODELS["qwen3-one-kv-head"]
    name = "model.layers.0.self_attn"
    with host_of(checkpoint_dir, "qwen3-one-kv-head", tp_size) as host:
        codes, scales = f"{name}.qkv_proj.weight", f"{name}.qkv_proj.weight_scale_inv"
        before = host.call_all(parameter, codes), host.call_all(parameter, scales)
        key = f"{name}.k_proj.weight"
        assert all(ok for ok, _ in host.call_all(update, [(key, model.second[key])]))
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


def test_with_more_ranks_than_kv_heads_every_rank_has_the_whole_head(checkpoint_dir):
    model = MODELS["qwen3-one-kv-head"]
    name = "model.layers.1.self_attn"
    with host_of(checkpoint_dir, "qwen3-one-kv-head", 2) as host:
        assert all(ok for ok, _ in host.call_all(update, list(model.second.items())))
        codes = host.call_all(parameter, f"{name}.qkv_proj.weight")
        scales = host.call_all(parameter, f"{name}.qkv_proj.weight_scale_inv")
    for part, row in (("k", 128), ("v", 256)):
        expected, scale = quantize_blockwise(model.second[f"{name}.{part}_proj.weight"])
        for rank in range(2):
            assert torch.equal(codes[rank][row : row + 128], expected.view(torch.uint8))
            assert torch.equal(scales[rank][row // 128 : row // 128 + 1], scale)


def test_a_model_may_be_misaligned_only_when_sharded_and_decides_alike_at_every_update(
    checkpoint_dir,
):
    model = MODELS["qwen3"]
    plans = {}
    for tp_size in (1, 2):
        with host_of(checkpoint_dir, "qwen3", tp_size) as host:
            before = host.call_all(status)
            # One tensor per call: a decision taken from the tensor at hand would differ.
            for item in model.second.items():
                assert all(ok for ok, _ in host.call_all(update, [item]))
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


@pytest.mark.parametrize("name", ["qwen3", "qwen2-bias", "llama"])
def test_shards_are_slices_of_the_unsharded_bytes(checkpoint_dir, name):
    with host_of(checkpoint_dir, name, 1) as one, host_of(checkpoint_dir, name, 2) as two:
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


# -- native agrees, dtypes on disk, dummy ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tp_size"),
    [("qwen3", 1), ("qwen2-bias", 1), ("qwen3-one-kv-head", 2), ("qwen3-moe", 1)],
)
def test_quantized_offline_and_served_by_sglangs_own_fp8_gives_the_same_bytes(
    checkpoint_dir, name, tp_size
):
    from sglang_fp8rl.testing.checkpoints import save_checkpoint

    model = MODELS[name]
    path: Path = checkpoint_dir / f"{name}-offline"
    save_checkpoint(
        path,
        model.config,
        quantized(model.first, quantize_blockwise),
        quantization_config={
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    )
    with host_of(checkpoint_dir, name, tp_size) as ours:
        online = ours.call_all(digests)
    with EngineHost(path, quantization=None, tp_size=tp_size) as native:
        offline = native.call_all(digests)
    for ours, native in zip(online, offline, strict=True):
        # SGLang's own method adds KV-cache scales; every other parameter is in both.
        assert {name: native[name] for name in ours} == ours


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_checkpoints_in_16_bit_and_in_shards_load_as_their_values(checkpoint_dir, dtype):
    model = MODELS["qwen3"]
    path = checkpoint(checkpoint_dir, model, "first", dtype=dtype, shards=3)
    with EngineHost(path) as host:
        found = host.call_all(digests)
        widened = [(name, w.to(dtype).float()) for name, w in model.first.items()]
        assert host.call(update, widened)[0]
        assert host.call_all(digests) == found


@pytest.mark.parametrize("tp_size", [1, 2])
def test_dummy_weights_and_a_full_update_equal_a_fresh_load(checkpoint_dir, tp_size):
    with host_of(checkpoint_dir, "qwen3", tp_size, "second") as fresh:
        expected = fresh.call_all(digests)
    with host_of(checkpoint_dir, "qwen3", tp_size, args=("--load-format", "dummy")) as host:
        state = host.call(status)
        assert not state["consistent"]
        assert "never loaded" in state["problems"][0]
        items = list(MODELS["qwen3"].second.items())
        assert all(ok for ok, _ in host.call_all(update, items))
        assert host.call_all(digests) == expected
        assert host.call(status)["consistent"]
