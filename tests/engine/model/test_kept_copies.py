"""What SGLang's real classes make of weights at their first use follows every update, or is refused."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from sglang_fp8rl.config import Options
from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.refit import ModelRefit
from sglang_fp8rl.errors import RefitError

pytestmark = pytest.mark.engine


def served(module: torch.nn.Module, forward) -> ModelRefit:
    """A model of one module, loaded, and run once."""
    model = torch.nn.Sequential(module)
    for seed, parameter in enumerate(model.parameters()):
        parameter.requires_grad = False
        parameter.normal_(generator=torch.Generator().manual_seed(seed))
    model.load_weights = lambda pairs: [
        model.get_parameter(name).data.copy_(tensor) for name, tensor in pairs
    ]
    refit = ModelRefit(model, Options(), {}, list)
    refit.attach()
    model.load_weights([(name, one.data.clone()) for name, one in model.named_parameters()])
    refit.note_loaded()
    forward(module)
    return refit


def update(refit: ModelRefit) -> None:
    named = [(name, one.data + 1) for name, one in refit.model.named_parameters()]
    with refit.during(Update(Origin.TENSOR)):
        refit.model.load_weights(named)
    refit.derived.end_of_update()


def follows(refit: ModelRefit, weight: torch.Tensor, copy) -> bool:
    """Whether a copy has the weight's new values after each of two updates, and keeps its place."""
    kept = copy()
    address, before = kept.data_ptr(), kept.clone()
    for _ in range(2):
        update(refit)
        assert not torch.equal(kept, before)
        assert copy() is kept
        assert kept.data_ptr() == address
        if not torch.equal(kept, weight.to(kept.dtype)):
            return False
    return True


def test_the_correction_bias_in_the_dtype_of_the_router():
    from sglang.srt.layers.moe.topk import TopKConfig

    if not hasattr(TopKConfig, "correction_bias_for_dtype"):
        pytest.skip("this SGLang keeps no such copy")
    module = torch.nn.Module()
    module.bias = torch.nn.Parameter(torch.zeros(8))
    module.topk_config = TopKConfig(top_k=2, correction_bias=module.bias)

    def copy():
        return module.topk_config.correction_bias_for_dtype(torch.bfloat16)

    assert follows(served(module, lambda _: copy()), module.bias, copy)


@pytest.mark.parametrize("module", ["glm4_moe.Glm4MoeGate", "glm4_moe_lite.Glm4MoeLiteGate"])
def test_the_fp32_copy_of_a_gate(module):
    file, _, name = module.partition(".")
    gate_class = getattr(importlib.import_module(f"sglang.srt.models.{file}"), name)
    gate = gate_class(SimpleNamespace(n_routed_experts=4, hidden_size=16)).to(torch.bfloat16)
    if not hasattr(gate, "_weight_fp32"):
        pytest.skip("this SGLang keeps no such copy")
    refit = served(gate, lambda gate: gate(torch.ones(1, 16, dtype=torch.bfloat16)))
    assert follows(refit, gate.weight, lambda: gate._weight_fp32)


class Folds(torch.nn.Module):
    """Gemma 4's router, whose class needs more of SGLang to be built."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.register_buffer("norm", torch.ones(8))

    def fuse_scale(self) -> None:
        self.norm.data.copy_(2 * self.scale)

    def forward(self) -> None:
        self.fuse_scale()


def test_a_scale_that_is_folded_at_the_first_pass_is_folded_again():
    module = Folds()
    refit = served(module, lambda module: module.forward())
    for _ in range(2):
        update(refit)
        refit.derived.refresh(["0.scale"])
        assert torch.equal(module.norm, 2 * module.scale)


def test_a_tensor_that_is_computed_at_the_first_pass_and_never_again_is_refused():
    class FoldsByAnotherName(Folds):
        fuse_scale = None

        def forward(self) -> None:
            Folds.fuse_scale(self)

    refit = served(FoldsByAnotherName(), lambda module: module.forward())
    with pytest.raises(RefitError, match=r"0\.norm.*changed by a forward pass"):
        update(refit)


def test_a_copy_of_either_of_two_weights_is_refused():
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.zeros(8))
    module.b = torch.nn.Parameter(torch.zeros(8))

    def keep(module):
        module.kept = torch.zeros(8)

    refit = served(module, lambda _: None)
    for one in (module.a, module.b):
        one.zero_()
    keep(module)
    with pytest.raises(RefitError, match=r"0\.kept.*a copy of 0\.a or of 0\.b"):
        update(refit)


def test_work_space_is_no_copy_and_stays_as_it_is():
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.zeros(8))

    def keep(module):
        module.space = torch.full((3,), 5.0)

    refit = served(module, keep)
    update(refit)
    assert dict(refit.derived.kept_copies.places()) == {}
    assert module.space.tolist() == [5.0, 5.0, 5.0]
