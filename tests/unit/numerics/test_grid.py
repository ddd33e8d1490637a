"""Which scales a box of a matrix has: against sets of values, box by box."""

import itertools

import numpy as np
import pytest

from sglang_fp8rl.errors import QuantizationError
from sglang_fp8rl.formats import FORMATS
from sglang_fp8rl.formats.format import BlockGrid, ceil_div

BLOCKWISE, PER_CHANNEL = FORMATS["blockwise"], FORMATS["per_channel"]
SIDES = list(itertools.product((1, 4, 5), (1, 3), (1, 2, 3), (1, 2)))


def boxes(shape):
    spans = [
        [(start, size) for start in range(full + 1) for size in range(full - start + 1)]
        for full in shape
    ]
    for (row, height), (column, width) in itertools.product(*spans):
        yield (row, column), (height, width)


def blocks_by_value(grid):
    """Each scale's values, by counting through all values of the matrix."""
    found = {}
    for value in itertools.product(*map(range, grid.shape)):
        at = tuple(place // step for place, step in zip(value, grid.block, strict=True))
        found.setdefault(at, set()).add(value)
    return found


@pytest.mark.parametrize(("rows", "columns", "block_n", "block_k"), SIDES)
def test_a_box_is_whole_if_no_block_of_it_has_a_value_outside(rows, columns, block_n, block_k):
    grid = BlockGrid((rows, columns), (block_n, block_k))
    blocks = blocks_by_value(grid)
    assert len(blocks) == grid.scale_shape[0] * grid.scale_shape[1]
    for start, shape in boxes(grid.shape):
        spans = [range(at, at + size) for at, size in zip(start, shape, strict=True)]
        inside = set(itertools.product(*spans))
        if not inside:
            continue
        owned = {at for at, values in blocks.items() if values & inside}
        whole = all(blocks[at] <= inside for at in owned)
        assert grid.is_whole(start, shape) is whole
        if whole:
            parts = grid.scales_of(start, shape)
            indices = [range(part.start, part.stop) for part in parts]
            assert set(itertools.product(*indices)) == owned
        else:
            with pytest.raises(QuantizationError, match="inside a block"):
                grid.scales_of(start, shape)


def test_a_box_without_rows_has_no_scales_wherever_it_starts():
    grid = BlockGrid((300, 256), (128, 128))
    for start in (0, 128, 300):
        rows, columns = grid.scales_of((start, 0), (0, 256))
        assert rows.start == rows.stop == ceil_div(start, 128)
        assert columns == slice(0, 2)


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("full", [1024, 2048, 9216])
def test_block_scales_of_all_ranks_tile_the_scales_of_the_whole(full, tp_size):
    grid, rows = BLOCKWISE.grid((full, 256)), full // tp_size
    scales = [
        index
        for rank in range(tp_size)
        for part in [grid.scales_of((rank * rows, 0), (rows, 256))[0]]
        for index in range(part.start, part.stop)
    ]
    assert scales == list(range(full // 128))


@pytest.mark.parametrize(("start", "size"), [(64, 64), (0, 64), (128, 100)])
def test_a_shard_that_cuts_a_block_is_refused_by_name(start, size):
    grid = BLOCKWISE.grid((512, 256))
    for at, shape in (((start, 0), (size, 256)), ((0, 0), (512, 100))):
        with pytest.raises(
            QuantizationError, match=r"k_proj.*inside a block of \[128, 128\].*BF16"
        ):
            grid.scales_of(at, shape, name="k_proj")


def test_formats_give_the_scale_shape_of_a_matrix_and_of_each_expert_s():
    assert BLOCKWISE.grid((300, 256)).scale_shape == (3, 2)
    assert BlockGrid.of((300, 256), (64, 32)).scale_shape == (5, 8)
    assert PER_CHANNEL.grid((300, 256)).scale_shape == (300, 1)
    assert PER_CHANNEL.grid((8, 300, 256)) == BlockGrid((300, 256), (1, 256))
    assert PER_CHANNEL.grid((300, 256)).scales_of((37, 0), (11, 256)) == (
        slice(37, 48),
        slice(0, 1),
    )
    assert not PER_CHANNEL.grid((300, 256)).is_whole((0, 0), (300, 128))


def test_ceil_div_rounds_up_numbers_and_arrays():
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert ceil_div(np.array([0, 1, 4, 5]), np.array([4, 4, 4, 2])).tolist() == [0, 1, 1, 3]


@pytest.mark.parametrize("held", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", [(), (5,)])
def test_what_has_no_rows_has_no_grid(held, shape):
    with pytest.raises(QuantizationError, match="fewer than two dimensions"):
        held.grid(shape)
