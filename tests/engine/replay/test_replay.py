"""A bucket that was seen before is replayed, and gives the bytes of the native loaders."""

import pytest
import torch
from support.engine.commands import digests, parameter, set_longest_row, status
from support.engine.models import MODELS
from support.engine.pool import engine_key, on

pytestmark = pytest.mark.engine

OFF = ("--json-model-override-args", '{"quantization_config": {"replay": false}}')


def counts(host):
    return [state["replay"] for state in host.call_all(status)]


def halves_of(model):
    names = list(model.first)
    return names[::2], names[1::2]


@on(
    "qwen3-tp1", "qwen3-tp2", "llama-misaligned-tp2", "qwen3-moe-ep2",
    slow=("llama-misaligned-tp1", "qwen3-moe-tp2", "mixtral-tp1"),
)  # fmt: skip
def test_replayed_updates_give_the_bytes_of_a_fresh_load(host):
    model, expected = host.model, host.fresh("second").digests
    for load_format in (None, "flattened_bucket"):
        for which in ("first", "second"):
            state = getattr(model, which)
            for bucket in halves_of(model):
                host.send([(name, state[name]) for name in bucket], load_format)
        assert host.call_all(digests) == expected
        for state in host.call_all(status):
            assert state["consistent"], state["problems"]
    for rank in counts(host):
        assert rank["recipes"] == 4
        assert rank["calls"] == 4
        assert rank["tensors"] == 2 * len(model.first)
        assert rank["native_tensors"] == 0, rank["native_reasons"]


@on("qwen3-tp1", engine_key("qwen3", args=("--dtype", "float16"), label="fp16"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fp16_is_sent_and_served_as_bf16_is(host, dtype):
    states = [
        [(name, weight.to(dtype).float()) for name, weight in state.items()]
        for state in (host.model.first, host.model.second)
    ]
    host.send(states[1])  # the same numbers in FP32
    expected = host.call_all(digests)
    host.send(states[0])
    for state in states:
        host.send([(name, weight.to(dtype)) for name, weight in state])
    assert host.call_all(digests) == expected
    if dtype == torch.float32:
        assert expected == host.fresh("second").digests
    for rank in counts(host):
        assert rank["native_tensors"] == 0, rank["native_reasons"]


@on(engine_key("qwen3", args=("--dtype", "float16"), label="fp16"))
def test_a_number_that_fp16_does_not_hold_is_refused_and_the_old_one_kept(host):
    name = "model.norm.weight"
    old = host.call(parameter, name)
    assert old.dtype == torch.float16
    spoiled = {**host.model.first, name: host.model.first[name].clone()}
    spoiled[name][3] = 65520.0
    for is_replayed in (False, True):
        before = counts(host)[0]["calls"]
        words = (f"{name}: NaN or Inf in 1 of 1 block(s)", "FP16 from 65520")
        host.refuses(list(spoiled.items()), *words)
        assert torch.equal(host.call(parameter, name), old)
        assert counts(host)[0]["calls"] == before + is_replayed
        host.update_to("first")


@on(engine_key("qwen3", args=OFF, label="no-replay"))
def test_without_replay_nothing_is_recorded_and_the_bytes_are_the_same(host, engine_pool):
    model = host.model
    for _ in range(2):
        for bucket in halves_of(model):
            host.send([(name, model.second[name]) for name in bucket])
    assert host.call_all(digests) == engine_pool.fresh(engine_key("qwen3")).digests
    assert all(rank["calls"] == rank["recipes"] == 0 for rank in counts(host))


# -- one engine ------------------------------------------------------------------------------------


FIRST, SECOND = MODELS["qwen3"].first, MODELS["qwen3"].second


@on("qwen3-tp1")
def test_a_nan_in_a_replayed_bucket_keeps_its_block_and_names_its_tensor(host):
    name = "model.layers.0.mlp.down_proj"
    host.update_to("first", "first")
    before = host.call(parameter, f"{name}.weight")
    replayed = counts(host)[0]["calls"]
    spoiled = {**SECOND, f"{name}.weight": SECOND[f"{name}.weight"].clone()}
    spoiled[f"{name}.weight"][130, 5] = float("nan")
    host.refuses(list(spoiled.items()), f"{name}.weight", "first at [1, 0]")
    assert counts(host)[0]["calls"] == replayed + 1
    after = host.call(parameter, f"{name}.weight")
    assert torch.equal(after[128:256, :128], before[128:256, :128])
    assert not torch.equal(after[:128], before[:128])
    host.update_to("second")
    assert host.call(status)["consistent"], host.call(status)["problems"]


@on("qwen3-tp1")
def test_another_dtype_shape_or_order_is_another_plan(host):
    halves = [(name, weight.bfloat16()) for name, weight in FIRST.items()]
    layouts = (list(FIRST.items()), halves, halves[::-1])
    for _ in range(2):
        for tensors in layouts:
            host.send(tensors)
            assert host.call_all(digests) == host.as_loaded.digests
        assert counts(host)[0]["recipes"] == len(layouts)


@on("qwen3-tp1")
def test_what_the_kernels_do_not_know_is_left_to_the_loaders_and_counted(host):
    """Longer rows than they take."""
    longest = host.call(set_longest_row, 8)
    try:
        host.update_to("second", "first", "second")
    finally:
        host.call(set_longest_row, longest)
    assert host.call_all(digests) == host.fresh("second").digests
    after = counts(host)[0]
    assert after["calls"] == after["recipes"] == 0
    assert after["native_tensors"] == 3 * len(FIRST)
    assert any("kernels" in reason for reason in after["native_reasons"])


@on("qwen3-tp1")
def test_a_wrong_shape_of_the_same_size_is_not_replayed(host):
    name = "model.layers.1.mlp.up_proj.weight"
    for load_format in (None, "flattened_bucket"):
        for _ in range(2):
            host.send([(name, FIRST[name])], load_format)
        turned = SECOND[name].t().contiguous()
        host.refuses_and_keeps([(name, turned)], "shape", load_format=load_format)
        host.send([(name, FIRST[name])], load_format)
