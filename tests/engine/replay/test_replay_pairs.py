"""A bucket of FP8 weights with their scales is replayed too."""

import pytest
import torch
from support.engine.commands import digests, parameter, status
from support.engine.pool import on
from support.engine.trainer import in_fp8

from sglang_fp8rl.wire.refit_note import RefitNote

pytestmark = pytest.mark.engine

ONE_REFIT = RefitNote("of two buckets").to_text()


@on(
    "qwen3-tp2",
    "llama-misaligned-tp2",
    "deepseek-v3-tp1",
    "qwen3-moe-ep2",
    slow=("qwen3-moe-tp2",),
)
def test_replayed_pairs_equal_a_fresh_load(host):
    expected = host.fresh("second").digests
    buckets = {which: in_fp8(host, which) for which in ("first", "second")}
    for load_format in (None, "flattened_bucket"):
        host.send(buckets["first"], load_format)
        host.send(buckets["second"], load_format)
        assert host.call_all(digests) == expected
    for state in host.call_all(status):
        assert state["consistent"], state["problems"]
        replay = state["replay"]
        assert replay["calls"] == 2
        assert replay["tensors"] == 2 * len(buckets["first"])
        assert replay["native_tensors"] == 0, replay["native_reasons"]


DOWN = "model.layers.0.mlp.down_proj.weight"


def with_bad_scale(sent):
    sent[f"{DOWN}_scale_inv"].fill_(float("nan"))


def with_nan_code(sent):
    sent[DOWN].view(torch.uint8)[130, 9] = 0xFF


@on("qwen3-tp1")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (with_bad_scale, (f"{DOWN}_scale_inv",)),
        (with_nan_code, (DOWN, "NaN (0x7F or 0xFF)")),
    ],
)
def test_a_bad_pair_in_a_replayed_bucket_is_named_and_its_bytes_stay(host, spoil, words):
    for _ in range(2):
        host.send(in_fp8(host, "second"))
    before, codes = host.call(digests), host.call(parameter, DOWN)
    spoiled = in_fp8(host, "first")
    spoil(dict(spoiled))
    calls = host.call(status)["replay"]["calls"]
    host.refuses(spoiled, *words)
    assert host.call(status)["replay"]["calls"] == calls + 1
    after, changed = host.call(digests), host.call(parameter, DOWN)
    if spoil is with_bad_scale:
        assert after[f"{DOWN}_scale_inv"] == before[f"{DOWN}_scale_inv"]
        assert torch.equal(changed, codes)
    else:
        assert torch.equal(changed[130], codes[130])
        assert not torch.equal(changed[131], codes[131])
    other = DOWN.replace(".0.", ".1.")
    assert after[other] != before[other]


@on("qwen3-tp1")
def test_halves_in_two_buckets_stay_native_and_are_counted(host):
    sent = in_fp8(host, "second")
    scales = [(name, tensor) for name, tensor in sent if name.endswith("_scale_inv")]
    weights = [one for one in sent if not one[0].endswith("_scale_inv")]
    for _ in range(2):
        host.send([*weights, *scales[1:]], None, False, rid=ONE_REFIT)
        host.send(scales[:1], None, True, rid=ONE_REFIT)
    state = host.call(status)
    assert state["consistent"], state["problems"]
    assert any("half of an FP8 pair" in reason for reason in state["replay"]["native_reasons"])


@on("qwen3-tp1")
def test_dtype_of_codes_is_part_of_the_layout(host):
    """The same name as BF16 is another bucket."""
    host.send(in_fp8(host, "first"))
    host.send([(name, weight.bfloat16()) for name, weight in host.model.first.items()])
    host.send(in_fp8(host, "second"))
    assert host.call(status)["replay"]["calls"] == 1
