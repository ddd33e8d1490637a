"""Which parts of a parameter are new."""

import random

import numpy as np
import pytest
import torch

from sglang_fp8rl.engine.interception import Region, region_of
from sglang_fp8rl.engine.ledger.coverage import CoverageTable


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
        self.table.write_one(1, region, call)

    def new_elements(self, since):
        before, count, behind = self.table.new_elements(since)
        assert before == behind == 0
        return count


def test_parts_make_a_whole_in_any_order():
    coverage = Coverage((4, 6))
    for start in (2, 0, 3):
        coverage.add(rows(start, 1), 1)
        assert 0 < coverage.new_elements(1) < 24
    coverage.add(rows(1, 1), 1)
    assert coverage.new_elements(1) == 24


def test_the_same_part_twice_is_not_the_whole():
    coverage = Coverage((4, 6))
    for _ in range(4):
        coverage.add(rows(0, 1), 1)
    assert coverage.new_elements(1) == 6


def test_overlapping_parts_never_count_more_than_was_written():
    coverage = Coverage((4, 6))
    coverage.add(rows(0, 3), 1)
    coverage.add(rows(2, 1), 1)
    coverage.add(rows(2, 1), 1)
    assert coverage.new_elements(1) < 24


def test_of_a_parameter_that_is_all_old_nothing_is_new():
    coverage = Coverage((4, 6))
    coverage.add(rows(0, 4), 1)
    assert coverage.new_elements(2) == 0


def test_boxes_written_together_and_one_by_one_are_counted_alike():
    generator = random.Random(3)
    together, single = CoverageTable([(8, 6, 4)] * 3), CoverageTable([(8, 6, 4)] * 3)
    written = {}
    for call in range(1, 40):
        drawn = []
        for _ in range(generator.randint(1, 4)):
            whole = generator.random() < 0.2
            start = (0 if whole else generator.randrange(8), generator.choice((0, 3)), 0)
            region = Region(start, (8 if whole else 1, 3, 4))
            drawn.append((generator.randrange(3), region))
        numbers = np.array([together.number_of(*one) for one in drawn])
        together.write(np.array([parameter for parameter, _ in drawn]), numbers, call)
        for one in drawn:
            single.write_one(*one, call)
            written = {box: at for box, at in written.items() if box == one or not meet(box, one)}
            written[one] = call
        for since in (0, call - 2, call):
            assert (together.new_elements(since) == single.new_elements(since)).all()
            assert together.new_elements(since).tolist() == elements(written, since)


def meet(box, other):
    """Whether two boxes share an element."""
    (parameter, one), (another, two) = box, other
    sides = zip(one.start, one.shape, two.start, two.shape, strict=True)
    return parameter == another and all(a < b + m and b < a + n for a, n, b, m in sides)


def elements(written, since):
    """Per parameter, what lies in boxes that were written at `since` or later, marked one by one."""
    marked = torch.zeros(3, 8, 6, 4)
    for (parameter, box), call in written.items():
        if call >= since:
            here = (slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
            marked[parameter][tuple(here)] += 1
    assert marked.max() <= 1
    return marked.flatten(1).sum(1).long().tolist()
