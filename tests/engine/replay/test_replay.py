"""A bucket that was seen before is replayed, and gives the bytes of the native loaders."""

import pytest
import torch
from support.engine.commands import digests, parameter, set_longest_row, status, update
from support.engine.models import MODELS
from support.engine.pool import engine_key, on

pytestmark = pytest.mark.engine

OFF = ("--json-model-override-args", '{"quantization_config": {"replay": false}}')


def sent(host, tensors, *options):
    for success, message in host.call_all(update, tensors, *options):
        assert success, message


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
                sent(host, [(name, state[name]) for name in bucket], load_format)
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
    sent(host, states[1])  # the same numbers in FP32
    expected = host.call_all(digests)
    sent(host, states[0])
    for state in (states[0], states[1]):
        sent(host, [(name, weight.to(dtype)) for name, weight in state])
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
        success, message = host.call(update, list(spoiled.items()))
        assert not success
        assert f"{name}: NaN or Inf in 1 of 1 block(s)" in message
        assert "FP16 from 65520" in message
        assert torch.equal(host.call(parameter, name), old)
        assert counts(host)[0]["calls"] == before + is_replayed
        sent(host, list(host.model.first.items()))


@on(engine_key("qwen3", args=OFF, label="no-replay"))
def test_without_replay_nothing_is_recorded_and_the_bytes_are_the_same(host, engine_pool):
    model = host.model
    for _ in range(2):
        for bucket in halves_of(model):
            sent(host, [(name, model.second[name]) for name in bucket])
    assert host.call_all(digests) == engine_pool.fresh(engine_key("qwen3")).digests
    assert all(rank["calls"] == rank["recipes"] == 0 for rank in counts(host))


# -- one engine ------------------------------------------------------------------------------------


def state_of(which="first"):
    return dict(getattr(MODELS["qwen3"], which))


@on("qwen3-tp1")
def test_a_nan_in_a_replayed_bucket_keeps_its_block_and_names_its_tensor(host):
    name = "model.layers.0.mlp.down_proj"
    for _ in range(2):
        sent(host, list(state_of().items()))
    before = host.call(parameter, f"{name}.weight")
    replayed = counts(host)[0]["calls"]
    spoiled = state_of("second")
    weight = spoiled[f"{name}.weight"] = spoiled[f"{name}.weight"].clone()
    weight[130, 5] = float("nan")
    success, message = host.call(update, list(spoiled.items()))
    assert not success
    assert f"{name}.weight" in message
    assert "first at [1, 0]" in message
    assert counts(host)[0]["calls"] == replayed + 1
    after = host.call(parameter, f"{name}.weight")
    assert torch.equal(after[128:256, :128], before[128:256, :128])
    assert not torch.equal(after[:128], before[:128])
    assert not host.call(status)["consistent"]
    sent(host, list(state_of("second").items()))
    assert host.call(status)["consistent"], host.call(status)["problems"]


@on("qwen3-tp1")
def test_another_dtype_shape_or_order_is_another_plan(host):
    sent(host, list(state_of().items()))
    first = host.call(digests)
    plans = counts(host)[0]["recipes"]
    halves = [(name, weight.bfloat16()) for name, weight in state_of().items()]
    sent(host, halves)
    sent(host, halves[::-1])
    assert counts(host)[0]["recipes"] == plans + 2
    for tensors in (halves, halves[::-1], list(state_of().items())):
        sent(host, tensors)
        assert host.call(digests) == first


@on("qwen3-tp1")
def test_what_the_kernels_do_not_know_is_left_to_the_loaders_and_counted(host):
    """Longer rows than they take."""
    longest = host.call(set_longest_row, 8)
    try:
        for which in ("second", "first", "second"):
            sent(host, list(state_of(which).items()))
    finally:
        host.call(set_longest_row, longest)
    assert host.call_all(digests) == host.fresh("second").digests
    after = counts(host)[0]
    assert after["calls"] == after["recipes"] == 0
    assert after["native_tensors"] == 3 * len(state_of())
    assert any("kernels" in reason for reason in after["native_reasons"])


@on("qwen3-tp1")
def test_a_wrong_shape_of_the_same_size_is_not_replayed(host):
    name = "model.layers.1.mlp.up_proj.weight"
    for load_format in (None, "flattened_bucket"):
        for _ in range(2):
            sent(host, [(name, state_of()[name])], load_format)
        before = host.call(digests)
        turned = state_of("second")[name].t().contiguous()
        success, message = host.call(update, [(name, turned)], load_format)
        assert not success
        assert "shape" in message
        assert host.call(digests) == before
        sent(host, [(name, state_of()[name])], load_format)


@on("qwen3-tp1")
def test_a_name_twice_in_one_call_is_refused_and_nothing_of_it_is_stored(host):
    name = "model.layers.0.mlp.up_proj.weight"
    before = host.call(digests)
    for load_format in (None, "flattened_bucket"):
        twice = [(name, state_of("second")[name]), (name, state_of()[name])]
        success, message = host.call(update, twice, load_format)
        assert not success
        assert name in message
        assert "twice" in message
    assert host.call(digests) == before
    assert host.call(status)["state"] == "failed"
    sent(host, list(state_of().items()))
