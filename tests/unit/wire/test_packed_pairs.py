"""A weight and its scale as one tensor: the same bytes, and nothing that could be mistaken for them."""

import pytest
import torch
from plans import BLOCKWISE, PER_CHANNEL, PLAIN, make_plan

from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.trainer import LocalShard, WireStats, quantize_for_refit
from sglang_fp8rl.wire.pair import PAIR_SUFFIX, pack_pair, unpack_pair

SHAPES = {
    "a.weight": (BLOCKWISE, (300, 257)),
    "b.weight": (PER_CHANNEL, (70, 96)),
    "norm.weight": (PLAIN, (96,)),
}
PLAN = make_plan(SHAPES)


def weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, (_, shape) in SHAPES.items()}


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("shift", range(4))
def test_packed_and_apart_are_the_same_bytes_wherever_they_lie_in_a_bucket(shift):
    stats, apart_stats = WireStats(), WireStats()
    apart = dict(quantize_for_refit(weights().items(), PLAN, stats=apart_stats))
    packed = dict(quantize_for_refit(weights().items(), PLAN, pack_pairs=True, stats=stats))
    assert list(packed) == [f"a.weight{PAIR_SUFFIX}", f"b.weight{PAIR_SUFFIX}", "norm.weight"]
    for name, scale in (("a.weight", "a.weight_scale_inv"), ("b.weight", "b.weight_scale")):
        one = packed[name + PAIR_SUFFIX]
        moved = torch.empty(one.numel() + shift, dtype=torch.uint8)[shift:].copy_(one)
        shapes = tuple(apart[name].shape), tuple(apart[scale].shape)
        codes, scales = unpack_pair(name, moved, *shapes)
        assert torch.equal(bits(codes), bits(apart[name]))
        assert torch.equal(scales, apart[scale])
    assert stats.nbytes == apart_stats.nbytes + 2 * 16
    assert (stats.tensors, stats.quantized) == (apart_stats.tensors, apart_stats.quantized)


@pytest.mark.parametrize("what", ["short", "long", "other shape", "other dtype", "header"])
def test_what_is_no_pair_of_this_weight_is_refused(what):
    codes = torch.zeros(256, 256).to(torch.float8_e4m3fn)
    packed = pack_pair(codes, torch.ones(2, 2))
    shape, scale_shape = (256, 256), (2, 2)
    if what == "short":
        packed = packed[:10]
    elif what == "long":
        packed = torch.cat([packed, packed[:1]])
    elif what == "other shape":
        scale_shape = (2, 3)
    elif what == "other dtype":
        packed = packed.view(torch.int8)
    else:
        packed = packed + 1
    with pytest.raises(RefitError, match=r"w\.fp8rl_pair"):
        unpack_pair("w", packed, shape, scale_shape)


def test_shards_are_not_packed():
    shard = LocalShard(weights()["a.weight"][:128], (300, 257), (0, 0))
    with pytest.raises(RefitError, match="Gather shards first"):
        list(quantize_for_refit([("a.weight", shard)], PLAN, pack_pairs=True))
