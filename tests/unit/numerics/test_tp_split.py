"""Rows, columns and block scales per rank, in pure integers, at TP 1, 2, 4 and 8."""

import pytest

from sglang_fp8rl.errors import QuantizationError
from sglang_fp8rl.numerics.tp_split import Span, owned_kv_span, owned_span, scale_span

TP_SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("full", [1024, 4096, 1368])
def test_ranks_own_every_row_once_and_in_order(full, tp_size):
    rows = [
        row
        for rank in range(tp_size)
        for span in [owned_span(full, rank, tp_size)]
        for row in range(span.start, span.stop)
    ]
    assert rows == list(range(full))


def test_a_size_that_tp_does_not_divide_is_refused():
    with pytest.raises(QuantizationError, match="size 1000 over tp_size 16"):
        owned_span(1000, 0, 16)


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_every_kv_head_is_owned_by_equally_many_neighbouring_ranks(kv_heads, tp_size):
    head_dim = 64
    owners = {head: [] for head in range(kv_heads)}
    for rank in range(tp_size):
        span = owned_kv_span(kv_heads, head_dim, rank, tp_size)
        assert span.start % head_dim == 0
        for head in range(span.start // head_dim, span.stop // head_dim):
            owners[head].append(rank)
    replicas = max(1, tp_size // kv_heads)
    for head, ranks in owners.items():
        assert len(ranks) == replicas, head
        assert ranks == list(range(ranks[0], ranks[0] + replicas))


def test_with_more_ranks_than_heads_a_rank_does_not_own_the_head_of_its_own_number():
    # Rank 2 of 4 over 2 heads holds head 1; cutting by rank alone would give it rows 128..192.
    assert owned_kv_span(2, 64, 2, 4) == Span(64, 64)


def test_kv_heads_and_ranks_that_do_not_divide_are_refused():
    with pytest.raises(QuantizationError, match="3 heads over tp_size 8"):
        owned_kv_span(3, 64, 0, 8)


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("full", [1024, 2048, 9216])
def test_block_scales_of_all_ranks_tile_the_scales_of_the_whole(full, tp_size):
    scales = [
        index
        for rank in range(tp_size)
        for span in [scale_span(owned_span(full, rank, tp_size), 128, full)]
        for index in range(span.start, span.stop)
    ]
    assert scales == list(range(full // 128))


def test_a_short_last_block_has_a_scale():
    assert scale_span(Span(0, 576), 128, 576) == Span(0, 5)


@pytest.mark.parametrize("span", [Span(64, 64), Span(0, 64), Span(128, 100)])
def test_a_shard_that_starts_or_ends_inside_a_block_is_refused_by_name(span):
    with pytest.raises(QuantizationError, match=r"k_proj.*inside a block of 128.*BF16"):
        scale_span(span, 128, 512, name="k_proj")


def test_per_channel_scales_go_with_their_rows():
    assert scale_span(Span(37, 11), 1, 512) == Span(37, 11)
