"""What comes for a parameter that another tensor writes: held against what is served, where its refit ends."""

import pytest
import torch

from sglang_fp8rl.engine.ledger import sent_twice
from sglang_fp8rl.engine.ledger.sent_twice import SentTwice


def values(seed: int = 0) -> torch.Tensor:
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 11, 1 << 20], autouse=True)
def chunks(request, monkeypatch):
    monkeypatch.setattr(sent_twice, "_CHUNK_ELEMENTS", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_same_in_the_dtype_that_is_served_and_in_either_order(dtype):
    served, came = torch.zeros(9, 5, dtype=torch.bfloat16), SentTwice()
    came.note("head", [(values().to(dtype), served[1:8])], 3, "a rule")
    assert [("head" in text, "a rule" in text) for text in came.differing(3)] == [(True, True)]
    served[1:8] = values()
    assert came.differing(3) == ()


def test_every_part_counts_and_of_a_name_the_last_one_that_came():
    served = [values(seed).bfloat16() for seed in (1, 2)]
    came = SentTwice()
    came.note("head", [(values(1), served[0]), (values(3), served[1])], 3, "a rule")
    assert len(came.differing(0)) == 1
    came.note("head", [(values(1), served[0]), (values(2), served[1])], 4, "a rule")
    assert came.differing(0) == ()


def test_what_came_before_the_refit_is_of_another_one():
    came = SentTwice()
    came.note("head", [(values(1), values(2))], 3, "a rule")
    assert came.differing(4) == ()
    assert came.differing(3) != ()
    came.forget()
    assert came.differing(3) == ()
