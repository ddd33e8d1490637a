"""A bucket of FP8 weights with their scales is replayed too."""

import random

import pytest
import torch
from support.by_definition import quantize_blockwise, quantize_per_channel
from support.engine.commands import digests, parameter, plan_document, status, update
from support.engine.models import MODELS
from support.engine.pool import on

from sglang_fp8rl.wire.refit_note import RefitNote

pytestmark = pytest.mark.engine

QUANTIZE = {"blockwise": quantize_blockwise, "per_channel": quantize_per_channel}

ONE_REFIT = RefitNote("of two buckets").to_text()


def quantized(host, model, which):
    """The names of the plan, shuffled, as a trainer that quantizes before the transfer sends them."""
    tensors, sent = host.call(plan_document)["tensors"], []
    for name, weight in getattr(model, which).items():
        wire = tensors[name]["wire"]
        if "scale" in wire:
            codes, scale = QUANTIZE[tensors[name]["scheme"]](weight)
            sent += [(name, codes), (wire["scale"], scale)]
        else:
            sent.append((name, weight))
    random.Random(0).shuffle(sent)
    return sent


def deliver(host, sent, *options):
    for success, message in host.call_all(update, sent, *options):
        assert success, message


@on(
    "qwen3-tp2",
    "llama-misaligned-tp2",
    "deepseek-v3-tp1",
    "qwen3-moe-ep2",
    slow=("qwen3-moe-tp2",),
)
def test_replayed_pairs_equal_a_fresh_load(host):
    model, expected = host.model, host.fresh("second").digests
    buckets = {which: quantized(host, model, which) for which in ("first", "second")}
    for load_format in (None, "flattened_bucket"):
        deliver(host, buckets["first"], load_format)
        deliver(host, buckets["second"], load_format)
        assert host.call_all(digests) == expected
    for state in host.call_all(status):
        assert state["consistent"], state["problems"]
        replay = state["replay"]
        assert replay["calls"] == 2
        assert replay["tensors"] == 2 * len(buckets["first"])
        assert replay["native_tensors"] == 0, replay["native_reasons"]


@on("qwen3-tp1")
def test_a_bad_scale_in_a_replayed_bucket_is_named_and_its_codes_stay(host):
    model = MODELS["qwen3"]
    sent = dict(quantized(host, model, "second"))
    for _ in range(2):
        deliver(host, list(sent.items()))
    before = host.call(digests)
    weight = "model.layers.0.mlp.down_proj.weight"
    spoiled = quantized(host, model, "first")
    for name, tensor in spoiled:
        if name == f"{weight}_scale_inv":
            tensor.fill_(float("nan"))
    order = {name: at for at, name in enumerate(sent)}
    spoiled.sort(key=lambda one: order[one[0]])
    calls = host.call(status)["replay"]["calls"]
    success, message = host.call(update, spoiled)
    assert not success
    assert f"{weight}_scale_inv" in message
    state = host.call(status)
    assert state["replay"]["calls"] == calls + 1
    assert not state["consistent"]
    after = host.call(digests)
    assert after[weight] == before[weight]
    assert after[f"{weight}_scale_inv"] == before[f"{weight}_scale_inv"]
    assert (
        after["model.layers.1.mlp.down_proj.weight"]
        != before["model.layers.1.mlp.down_proj.weight"]
    )
    deliver(host, quantized(host, model, "first"))
    assert host.call(status)["consistent"], host.call(status)["problems"]


@on("qwen3-tp1")
def test_a_nan_among_the_codes_of_a_replayed_bucket_is_named_and_its_row_stays(host):
    model, weight = MODELS["qwen3"], "model.layers.0.mlp.down_proj.weight"
    sent = quantized(host, model, "second")
    for _ in range(2):
        deliver(host, sent)
    before = host.call(parameter, weight).view(torch.uint8)
    spoiled = quantized(host, model, "first")
    dict(spoiled)[weight].view(torch.uint8)[130, 9] = 0xFF
    calls = host.call(status)["replay"]["calls"]
    success, message = host.call(update, spoiled)
    assert not success
    assert weight in message
    assert "NaN (0x7F or 0xFF)" in message
    state = host.call(status)
    assert state["replay"]["calls"] == calls + 1
    assert not state["consistent"]
    after = host.call(parameter, weight).view(torch.uint8)
    assert torch.equal(after[130], before[130])
    assert not torch.equal(after[131], before[131])
    deliver(host, quantized(host, model, "first"))
    assert host.call(status)["consistent"], host.call(status)["problems"]


@on("qwen3-tp1")
def test_halves_in_two_buckets_stay_native_and_are_counted(host):
    model = MODELS["qwen3"]
    sent = quantized(host, model, "second")
    scales = [(name, tensor) for name, tensor in sent if name.endswith("_scale_inv")]
    weights = [one for one in sent if not one[0].endswith("_scale_inv")]
    with_one = [*weights, *scales[1:]]
    for _ in range(2):
        for bucket, flush in ((with_one, False), (scales[:1], True)):
            success, message = host.call(update, bucket, None, flush, rid=ONE_REFIT)
            assert success, message
    state = host.call(status)
    assert state["consistent"], state["problems"]
    assert any("half of an FP8 pair" in reason for reason in state["replay"]["native_reasons"])


@on("qwen3-tp1")
def test_dtype_of_codes_is_part_of_the_layout(host):
    """The same name as BF16 is another bucket."""
    model = MODELS["qwen3"]
    deliver(host, quantized(host, model, "first"))
    deliver(host, [(name, weight.to(torch.bfloat16)) for name, weight in model.first.items()])
    deliver(host, quantized(host, model, "second"))
    assert host.call(status)["replay"]["calls"] == 1
