"""Which parts of a parameter are new."""

import random

import pytest
import torch

from sglang_fp8rl.engine.interception import Region, region_of
from sglang_fp8rl.engine.report.coverage import CoverageTable


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


def rows(start, count):
    return Region((start, 0), (count, 6))


class Coverage:
    """The second of three parameters, so that one taken for another is seen."""

    def __init__(self, shape):
        self.table = CoverageTable([(2, 2), shape, shape])

    def add(self, region, call):
        self.table.write([self.table.number_of(1, region)], call)

    def new_fraction(self, since):
        others = self.table.new_fraction(since)
        assert others[0] == others[2] == 0
        return others[1]

    def is_mixed(self, since):
        return 0 < self.new_fraction(since) < 1


def test_parts_make_a_whole_in_any_order():
    coverage = Coverage((4, 6))
    for start in (2, 0, 3):
        coverage.add(rows(start, 1), 1)
        assert coverage.is_mixed(1)
    coverage.add(rows(1, 1), 1)
    assert not coverage.is_mixed(1)
    assert coverage.new_fraction(1) == 1.0


def test_the_same_part_twice_is_not_the_whole():
    coverage = Coverage((4, 6))
    for _ in range(4):
        coverage.add(rows(0, 1), 1)
    assert coverage.new_fraction(1) == pytest.approx(0.25)


def test_overlapping_parts_never_count_more_than_was_written():
    coverage = Coverage((4, 6))
    coverage.add(rows(0, 3), 1)
    coverage.add(rows(2, 1), 1)
    coverage.add(rows(2, 1), 1)
    assert coverage.new_fraction(1) < 1


def test_a_parameter_that_is_all_old_is_not_mixed():
    coverage = Coverage((4, 6))
    coverage.add(rows(0, 4), 1)
    assert not coverage.is_mixed(2)


def test_boxes_written_together_and_one_by_one_are_counted_alike():
    generator = random.Random(3)
    together, single = CoverageTable([(8, 6, 4)] * 3), CoverageTable([(8, 6, 4)] * 3)
    for call in range(1, 40):
        drawn = []
        for _ in range(generator.randint(1, 4)):
            whole = generator.random() < 0.2
            start = (0 if whole else generator.randrange(8), generator.choice((0, 3)), 0)
            region = Region(start, (8 if whole else 1, 3, 4))
            drawn.append((generator.randrange(3), region))
        together.write([together.number_of(*one) for one in drawn], call)
        for one in drawn:
            single.write([single.number_of(*one)], call)
        for since in (0, call - 2, call):
            assert (together.new_elements(since) == single.new_elements(since)).all()
            assert (together.new_elements(since) == elements(together, since)).all()


def elements(table, since):
    """The same from the boxes themselves, marked one by one."""
    counts = []
    for parameter in range(3):
        marked = torch.zeros(8, 6, 4)
        for region in table.new_regions(parameter, since):
            marked[
                tuple(slice(a, a + n) for a, n in zip(region.start, region.shape, strict=True))
            ] += 1
        assert marked.max() <= 1
        counts.append(int(marked.sum()))
    return counts
