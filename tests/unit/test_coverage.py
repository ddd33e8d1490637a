"""Which parts of a parameter are new."""

import random

import pytest
import torch

from sglang_fp8rl.engine.coverage import Coverage, Region, region_of


@pytest.mark.parametrize("shape", [(7,), (6, 5), (3, 4, 5), (1, 6, 1), (4, 1)])
def test_a_box_view_is_found_again(shape):
    parameter = torch.empty(shape)
    generator = random.Random(0)
    for _ in range(50):
        start = [generator.randrange(size) for size in shape]
        size = [generator.randint(1, n - a) for n, a in zip(shape, start, strict=True)]
        view = parameter
        for dim, (a, n) in enumerate(zip(start, size, strict=True)):
            view = view.narrow(dim, a, n)
        found = region_of(view.storage_offset(), tuple(view.shape), view.stride(), shape)
        assert found is not None
        marked = torch.zeros(shape)
        for dim, (a, n) in enumerate(zip(found.start, found.shape, strict=True)):
            assert a + n <= shape[dim]
        box = marked[tuple(slice(a, a + n) for a, n in zip(found.start, found.shape, strict=True))]
        box.fill_(1)
        expected = torch.zeros(shape)
        expected.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
        assert torch.equal(marked, expected)


def test_a_view_that_is_no_box_is_not_taken_for_one():
    view = torch.empty(6, 6)[::2]
    assert region_of(0, tuple(view.shape), view.stride(), (6, 6)) is None


def test_parts_make_a_whole_in_any_order():
    coverage = Coverage((4, 6))
    for start in (2, 0, 3):
        coverage.add(Region((start, 0), (1, 6)))
        assert coverage.is_partial
    coverage.add(Region((1, 0), (1, 6)))
    assert not coverage.is_partial
    assert coverage.fraction == 1.0


def test_the_same_part_twice_is_not_the_whole():
    coverage = Coverage((4, 6))
    for _ in range(4):
        coverage.add(Region((0, 0), (1, 6)))
    assert coverage.is_partial
    assert coverage.fraction == pytest.approx(0.25)


def test_overlapping_parts_never_count_more_than_was_written():
    coverage = Coverage((4, 4))
    coverage.add(Region((0, 0), (3, 4)))
    coverage.add(Region((2, 0), (1, 4)))
    coverage.add(Region((2, 0), (1, 4)))
    assert coverage.is_partial
