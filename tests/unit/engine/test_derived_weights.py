"""Names that a model binds anew in an update: back in the memory that they had, or refused."""

import pytest
import torch

from sglang_fp8rl.errors import RefitError

pytest.importorskip("sglang")

from sglang_fp8rl.engine.model.derived_weights import DerivedWeights


def two_views(first, second):
    model = torch.nn.Module()
    model.a, model.b = first, second
    return model


def test_views_that_move_together_keep_their_memory_and_get_their_values():
    old = torch.zeros(4)
    model = two_views(old, old[2:])
    with DerivedWeights(model).in_place():
        new = torch.arange(8.0)
        model.a, model.b = new[2:6], new[4:6]
    assert model.a.tolist() == [2, 3, 4, 5]
    assert model.b.tolist() == [4, 5]
    assert model.a.data_ptr() == old.data_ptr()


def test_views_of_the_same_memory_that_part_are_refused():
    old = torch.zeros(4)
    model = two_views(old, old.view(4))

    def part():
        new = torch.arange(8.0)
        model.a, model.b = new[:4], new[4:]

    with (
        pytest.raises(RefitError, match="memory that another name has"),
        DerivedWeights(model).in_place(),
    ):
        part()


def test_memory_that_a_container_has_as_well_is_not_given_another_value():
    model = torch.nn.Module()
    model.a = torch.zeros(4)
    model.kept = {"a": model.a}

    def bind():
        model.a = torch.ones(4)

    with (
        pytest.raises(RefitError, match="memory that another name has"),
        DerivedWeights(model).in_place(),
    ):
        bind()
    assert model.kept["a"].tolist() == [0, 0, 0, 0]
