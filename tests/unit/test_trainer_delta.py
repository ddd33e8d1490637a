"""Changed blocks: found, packed, moved and verified, on ragged matrices too. No server."""

from __future__ import annotations

import pytest
import torch
from plans import BLOCKWISE, PER_CHANNEL, PLAIN, make_plan

from sglang_fp8rl.delta_format import DELTA_SUFFIX, Delta, packed_bytes, unpack
from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.numerics import quantize_blockwise
from sglang_fp8rl.numerics.blocks import (
    block_digests,
    digests_of_blocks,
    read_blocks,
    write_blocks,
)
from sglang_fp8rl.trainer import LocalShard, SentState, WireStats, quantize_for_refit

SHAPES = [(256, 384), (300, 256), (256, 300), (300, 390), (7, 5), (128, 128), (1, 300)]
BLOCK = (128, 128)
PLAN = make_plan(
    {
        "a.weight": (BLOCKWISE, (300, 390)),
        "b.weight": (PER_CHANNEL, (70, 96)),
        "norm.weight": (PLAIN, (96,)),
    }
)


def random(shape, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: random(entry.shape, seed) for name, entry in PLAN.tensors.items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [BLOCK, (1, None), (16, 32)])
def test_a_digest_is_of_its_block_alone_however_it_is_read(shape, block):
    block = (block[0], block[1] or shape[1])
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    grid = [-(-size // step) for size, step in zip(shape, block, strict=True)]
    scale = random(grid).abs()
    whole = block_digests(codes, scale, block)
    row, column = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
    row, column = row.reshape(-1), column.reshape(-1)
    blocks = read_blocks(codes, row, column, block)
    assert torch.equal(digests_of_blocks(blocks, scale.reshape(-1)), whole.reshape(-1))
    wide = torch.randint(0, 256, (shape[0] + 3, shape[1] + 5), dtype=torch.uint8)
    inside = wide[1 : 1 + shape[0], 2 : 2 + shape[1]]  # rows apart, as in a fused parameter
    before = wide.clone()
    write_blocks(inside, row, column, blocks, block)
    assert torch.equal(inside, codes)
    wide[1 : 1 + shape[0], 2 : 2 + shape[1]] = before[1 : 1 + shape[0], 2 : 2 + shape[1]]
    assert torch.equal(wide, before)


def test_every_single_code_and_every_scale_counts_in_the_digest():
    codes, scale = torch.zeros(6, 8, dtype=torch.uint8), torch.ones(2, 2)
    base, seen = block_digests(codes, scale, (3, 4)), set()
    for i in range(6):
        for j in range(8):
            changed = codes.clone()
            changed[i, j] = 1
            differs = block_digests(changed, scale, (3, 4)) != base
            assert differs.sum() == 1
            assert differs[i // 3, j // 4]
            seen.add(int((block_digests(changed, scale, (3, 4)) - base)[i // 3, j // 4]))
    assert len(seen) == 12  # a constant for each place of a block
    scale[1, 0] += 1e-7
    assert (block_digests(codes, scale, (3, 4)) != base).tolist() == [[False, False], [True, False]]


def test_large_matrices_are_digested_in_chunks_with_the_same_result(monkeypatch):
    codes, scale = quantize_blockwise(random((700, 300)))
    whole = block_digests(codes, scale, BLOCK)
    monkeypatch.setattr("sglang_fp8rl.numerics.blocks._CHUNK", 1)
    assert torch.equal(block_digests(codes, scale, BLOCK), whole)


def test_the_first_refit_is_full_and_the_next_has_only_what_changed():
    state, first, stats = SentState(), weights(), WireStats()
    full = dict(quantize_for_refit(first.items(), PLAN, since=state))
    assert full.keys() == dict(quantize_for_refit(first.items(), PLAN)).keys()
    state.commit()
    assert state.nbytes == 8 * (3 * 4 + 70)
    second = {name: weight.clone() for name, weight in first.items()}
    second["a.weight"][130, 389] *= 1.5  # block (1, 3), the short last column
    second["b.weight"][69] *= 4  # its codes stay, its scale does not
    got = dict(quantize_for_refit(second.items(), PLAN, since=state, stats=stats))
    assert list(got) == [f"a.weight{DELTA_SUFFIX}", f"b.weight{DELTA_SUFFIX}", "norm.weight"]
    assert stats.nbytes == sum(tensor.nbytes for tensor in got.values())
    assert stats.nbytes_fp32 == 4 * (300 * 390 + 70 * 96 + 96)
    assert (state.blocks, state.blocks_sent) == (12 + 70, 2)
    delta = unpack("a.weight", got[f"a.weight{DELTA_SUFFIX}"], (3, 4), BLOCK)
    assert delta.index.tolist() == [7]
    delta = unpack("b.weight", got[f"b.weight{DELTA_SUFFIX}"], (70, 1), (1, 96))
    assert delta.index.tolist() == [69]


def test_what_was_not_committed_is_sent_again_and_a_new_plan_starts_anew():
    state, first, second = SentState(), weights(), weights(1)
    list(quantize_for_refit(first.items(), PLAN, since=state))
    state.commit()
    list(quantize_for_refit(second.items(), PLAN, since=state))  # never arrived
    unchanged = dict(quantize_for_refit(first.items(), PLAN, since=state))
    delta = unpack("a.weight", unchanged[f"a.weight{DELTA_SUFFIX}"], (3, 4), BLOCK)
    assert len(delta.index) == 0
    other = make_plan({"a.weight": (BLOCKWISE, (300, 390))}, use_weight_pow2_scale=True)
    got = dict(quantize_for_refit([("a.weight", first["a.weight"])], other, since=state))
    assert list(got) == ["a.weight", "a.weight_scale_inv"]


def test_a_weight_that_changed_everywhere_goes_whole():
    state = SentState()
    list(quantize_for_refit(weights().items(), PLAN, since=state))
    state.commit()
    got = dict(quantize_for_refit(weights(1).items(), PLAN, since=state))
    assert "a.weight" in got
    assert "a.weight_scale_inv" in got
    assert state.blocks_sent == state.blocks


def test_shards_are_refused_until_they_are_gathered():
    shard = LocalShard(random((128, 390)), (300, 390), (0, 0))
    with pytest.raises(RefitError, match="Gather shards first"):
        list(quantize_for_refit([("a.weight", shard)], PLAN, since=SentState()))


def make_delta(changed: int = 2) -> Delta:
    codes, scale = quantize_blockwise(random((300, 390)))
    index = torch.arange(changed)
    row, column = index // 4, index % 4
    blocks = read_blocks(codes, row, column, BLOCK)
    return Delta(block_digests(codes, scale, BLOCK), index, scale[row, column], blocks)


@pytest.mark.parametrize("changed", [0, 1, 12])
def test_packing_and_unpacking_gives_the_same(changed):
    delta = make_delta(changed)
    packed = delta.pack()
    assert packed.numel() == packed_bytes(12, changed, BLOCK)
    unaligned = torch.empty(packed.numel() + 1, dtype=torch.uint8)[1:].copy_(packed)
    again = unpack("a", unaligned, (3, 4), BLOCK)
    for field in ("digests", "index", "scale", "blocks"):
        assert torch.equal(getattr(again, field), getattr(delta, field))


@pytest.mark.parametrize("broken", ["magic", "short", "count", "index", "dtype", "empty"])
def test_a_delta_that_is_broken_is_refused(broken):
    delta = make_delta()
    packed = delta.pack()
    if broken == "magic":
        packed[0] += 1
    elif broken == "short":
        packed = packed[:-1]
    elif broken == "count":
        packed[8] += 1
    elif broken == "index":
        packed = Delta(delta.digests, delta.index + 11, delta.scale, delta.blocks).pack()
    elif broken == "dtype":
        packed = packed.view(torch.int8)
    else:
        packed = packed[:0]
    with pytest.raises(RefitError, match=r"a\.fp8rl_delta"):
        unpack("a", packed, (3, 4), BLOCK)
