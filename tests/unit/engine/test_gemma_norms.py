"""SGLang's own norm of Gemma's kind, in a toy: what it keeps beside its weight follows, natively and replayed."""

import pytest
import torch
from support.replayed import replay_of

from sglang_fp8rl.config import Options
from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.errors import RefitError

pytest.importorskip("sglang")

from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.model_loader.weight_utils import default_weight_loader

from sglang_fp8rl.engine.refit import ModelRefit

NAMES = ("first.weight", "second.weight", "matrix")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GemmaRMSNorm(8), GemmaRMSNorm(8)
        self.matrix = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
        self.to(torch.bfloat16)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: (4, 8) if name == "matrix" else (8,) for name in NAMES}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def fresh(seed):
    model = Model()
    with torch.no_grad():
        model.load_weights(weights(seed).items())
    return model


def started():
    model = Model()
    refit = ModelRefit(model, Options(), {}, list)
    refit.attach()
    model.load_weights(weights(0).items())
    refit.note_loaded()
    return refit


def send(refit, items):
    with refit.during(Update(Origin.TENSOR)):
        refit.model.load_weights(list(items))


def check_same(model, other):
    for name, buffer in other.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name
    for name, parameter in other.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], parameter), name


def test_a_bucket_with_a_norm_is_replayed_and_what_the_norm_keeps_follows():
    refit = started()
    check_same(refit.model, fresh(0))
    places = [one.gemma_weight.data_ptr() for one in (refit.model.first, refit.model.second)]
    for seed in (1, 2, 3):
        send(refit, weights(seed).items())
        check_same(refit.model, fresh(seed))
    assert replay_of(refit).counts.calls == 2
    assert not replay_of(refit).counts.native_tensors
    assert places == [
        one.gemma_weight.data_ptr() for one in (refit.model.first, refit.model.second)
    ]


def test_tensors_that_come_one_by_one_leave_a_fresh_model():
    refit = started()
    for seed in (1, 2):
        for item in reversed(weights(seed).items()):
            send(refit, [item])
        check_same(refit.model, fresh(seed))


@pytest.mark.parametrize("sent_before", [0, 1])
def test_a_norm_with_a_nan_keeps_what_it_had_and_what_is_made_of_that(sent_before):
    refit = started()
    for _ in range(sent_before):  # then the bad one is replayed
        send(refit, weights(1).items())
    bad = weights(2)
    bad["first.weight"][3] = float("nan")
    with pytest.raises(RefitError, match=r"first\.weight: NaN"):
        send(refit, bad.items())
    before, after = fresh(sent_before), fresh(2)
    assert torch.equal(refit.model.first.gemma_weight, before.first.gemma_weight)
    assert torch.equal(refit.model.second.gemma_weight, after.second.gemma_weight)


def test_what_a_norm_keeps_is_made_where_a_later_tensor_ends_the_call():
    refit = started()
    with pytest.raises(RefitError):
        send(refit, [("first.weight", weights(1)["first.weight"]), ("nobody", torch.zeros(1))])
    assert torch.equal(refit.model.first.gemma_weight, fresh(1).first.gemma_weight)
    assert torch.equal(refit.model.second.gemma_weight, fresh(0).second.gemma_weight)


def test_what_somebody_else_wrote_there_is_found_and_mended():
    refit = started()
    refit.model.first.gemma_weight.zero_()
    assert refit.derived.renewed(NAMES) == ["first.gemma_weight"]
    check_same(refit.model, fresh(0))
