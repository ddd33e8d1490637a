"""SGLang's own norm of Gemma's kind, in a toy: what it keeps beside its weight follows, natively and replayed."""

from types import SimpleNamespace

import pytest
import torch
from support.replayed import replay_of

from sglang_fp8rl.errors import RefitError

pytest.importorskip("sglang")

from sglang.srt.layers.layernorm import GemmaRMSNorm

from tools.census.toys.toy import Toy, check_same, loaded, update, weights


class Norms(Toy):
    names = ("first.weight", "second.weight", "matrix")

    def __init__(self):
        super().__init__()
        self.first, self.second = GemmaRMSNorm(8), GemmaRMSNorm(8)
        self.matrix = torch.nn.Parameter(torch.zeros(4, 8))
        self.to(torch.bfloat16).requires_grad_(False)


def fresh(seed):
    """SGLang's own, without this package."""
    model = Norms()
    model.load_weights(weights(model, seed).items())
    return SimpleNamespace(model=model)


def started():
    refit = loaded(Norms, 0)
    refit.note_loaded()
    return refit


def places(refit):
    return [one.gemma_weight.data_ptr() for one in (refit.model.first, refit.model.second)]


def test_a_bucket_with_a_norm_is_replayed_and_what_the_norm_keeps_follows():
    refit = started()
    check_same(refit, fresh(0))
    before = places(refit)
    for seed in (1, 2, 3):
        update(refit, weights(refit.model, seed))
        check_same(refit, fresh(seed))
    assert replay_of(refit).counts.calls == 2
    assert not replay_of(refit).counts.native_tensors
    assert places(refit) == before


def test_tensors_that_come_one_by_one_leave_a_fresh_model():
    refit = started()
    for seed in (1, 2):
        for name, one in reversed(weights(refit.model, seed).items()):
            update(refit, {name: one})
        check_same(refit, fresh(seed))


@pytest.mark.parametrize("sent_before", [0, 1])
def test_a_norm_with_a_nan_keeps_what_it_had_and_what_is_made_of_that(sent_before):
    refit = started()
    for _ in range(sent_before):  # then the bad one is replayed
        update(refit, weights(refit.model, 1))
    bad = weights(refit.model, 2)
    bad["first.weight"][3] = float("nan")
    with pytest.raises(RefitError, match=r"first\.weight: NaN"):
        update(refit, bad)
    before, after = fresh(sent_before).model, fresh(2).model
    assert torch.equal(refit.model.first.gemma_weight, before.first.gemma_weight)
    assert torch.equal(refit.model.second.gemma_weight, after.second.gemma_weight)


def test_what_a_norm_keeps_is_made_where_a_later_tensor_ends_the_call():
    refit = started()
    sent = weights(refit.model, 1)["first.weight"]
    with pytest.raises(RefitError):
        update(refit, {"first.weight": sent, "nobody": torch.zeros(1)})
    assert torch.equal(refit.model.first.gemma_weight, fresh(1).model.first.gemma_weight)
    assert torch.equal(refit.model.second.gemma_weight, fresh(0).model.second.gemma_weight)


def test_what_somebody_else_wrote_there_is_found_and_mended():
    refit = started()
    refit.model.first.gemma_weight.zero_()
    assert refit.derived.renewed(Norms.names) == ["first.gemma_weight"]
    check_same(refit, fresh(0))
