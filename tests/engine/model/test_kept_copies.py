"""What SGLang's real classes make of weights at their first use follows every update, or is refused."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.refit import ModelRefit
from sglang_fp8rl.errors import RefitError
from tools.census.toys.toy import attached

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
    refit = attached(model)
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
    """Into a tensor that is none of the names that this package knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.register_buffer("norm", torch.ones(8))

    def forward(self) -> None:
        self.norm.data.copy_(2 * self.scale)


class Held(torch.nn.Module):
    """Two weights, and whatever a test has it keep."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.tensor(values)) for _ in range(2))


def as_they_are(module: torch.nn.Module, forward) -> ModelRefit:
    """As `served`, with the weights that the module has."""
    values = [one.detach().clone() for one in module.parameters()]

    def run(module):
        for one, value in zip(module.parameters(), values, strict=True):
            one.data.copy_(value)
        forward(module)

    return served(module, run)


def test_a_tensor_that_is_computed_at_the_first_pass_and_never_again_is_refused_every_time():
    refit = served(Folds(), lambda module: module.forward())
    for _ in range(3):
        with pytest.raises(RefitError, match=r"0\.norm.*changed by a forward pass"):
            update(refit)


def test_a_copy_of_either_of_two_weights_is_refused_every_time():
    def keep(module):
        module.kept = module.a.detach().clone()

    refit = as_they_are(Held(1.0, 2.0, 3.0), keep)
    for _ in range(3):
        with pytest.raises(RefitError, match=r"0\.kept.*a copy of 0\.a or of 0\.b"):
            update(refit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_a_constant_is_no_evidence_of_a_copy(dtype):
    def keep(module):
        module.space = torch.zeros(3, dtype=dtype)

    refit = as_they_are(Held(0.0, 0.0, 0.0), keep)
    update(refit)
    assert not refit.derived.kept_copies.copies
    assert not refit.model[0].space.any()
    assert list(refit.derived.kept_copies.unproven) == ["0.space"]


def test_an_integer_that_equals_a_weight_is_no_copy_of_it():
    def keep(module):
        module.slots = [torch.tensor([0, 1, 2])]

    refit = as_they_are(Held(0.0, 1.0, 2.0), keep)
    update(refit)
    assert refit.model[0].slots[0].tolist() == [0, 1, 2]
    assert list(refit.derived.kept_copies.unproven) == ["0.slots.0"]


MADE = {
    "transposed": lambda weight: weight.t().contiguous(),
    "joined": lambda weight: torch.cat([weight, weight]),
    "scaled": lambda weight: 2 * weight,
    "padded": lambda weight: torch.nn.functional.pad(weight, (0, 1)),
    "quantized": lambda weight: (100 * weight).to(torch.float8_e4m3fn),
    "quantized to integers": lambda weight: (16 * weight).round().to(torch.int8),
}


@pytest.mark.parametrize("make", MADE.values(), ids=list(MADE))
def test_what_is_made_of_a_weight_and_is_no_copy_is_named_and_left(make):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(4, 3))

    def keep(module):
        module.made = make(module.weight.data)

    refit = served(module, keep)
    before = module.made.clone()
    for _ in range(2):
        update(refit)
        assert torch.equal(module.made, before)
        (place,) = refit.derived.kept_copies.unproven
        assert place == "0.made"


def test_the_halves_of_a_router_are_named():
    """What a real class keeps of its weight: the upper and lower halves, transposed."""
    try:
        muse_spark = importlib.import_module("sglang.srt.models.muse_spark")
    except ModuleNotFoundError:
        pytest.skip("this SGLang has no such class")
    kinds = [one for one in vars(muse_spark).values() if hasattr(one, "_build_split2")]
    gate = kinds[0](16, 4, torch.float32)
    refit = served(gate, lambda gate: gate._build_split2())
    update(refit)
    assert sorted(refit.derived.kept_copies.unproven) == ["0._split2_hi", "0._split2_lo"]


def test_what_is_no_copy_and_stands_beside_no_weight_is_not_spoken_of():
    module = Held(1.0, 2.0)
    module.rotary = torch.nn.Module()

    def keep(module):
        module.rotary.table = torch.arange(3.0)  # of another module, which has no weight
        module.view = module.a.detach()  # the weight itself

    refit = served(module, keep)
    update(refit)
    assert not refit.derived.kept_copies.unproven
    assert not refit.derived.kept_copies.copies


def test_what_is_made_behind_the_first_update_is_found_before_a_second():
    """A server may be updated before anything has run on it."""
    module, runner = Held(1.0, 2.0), SimpleNamespace(forward_pass_id=0)
    refit = served(module, lambda _: None)
    refit.runner = runner
    update(refit)
    runner.forward_pass_id = 1
    module.kept = module.a.detach().to(torch.bfloat16)
    for _ in range(2):
        update(refit)
        assert torch.equal(module.kept, module.a.to(torch.bfloat16))


def test_a_copy_that_is_kept_on_its_parameter_follows_it():
    module = Held(1.0, 2.0)

    def copy():
        if getattr(module.a, "_halved", None) is None:
            module.a._halved = module.a.detach().bfloat16()
        return module.a._halved

    assert follows(served(module, lambda _: copy()), module.a, copy)


def test_a_proof_and_a_release_look_too():
    for look in (
        lambda refit: refit.derived.renewed([]),
        lambda r: r.derived.kept_copies.keep_constants(),
    ):
        module = Held(1.0, 2.0)
        refit = served(module, lambda _: None)
        update(refit)
        module.kept, module.made = module.a.detach().bfloat16(), 2 * module.a.detach()
        look(refit)
        for one in (module.a, module.b):
            one.data.fill_(7)  # as memory that came back
        update(refit)
        assert torch.equal(module.kept, module.a.to(torch.bfloat16))
        assert list(refit.derived.kept_copies.unproven) == ["0.made"]


def test_what_no_update_sends_is_kept_over_a_release():
    module = Held(1.0, 2.0)
    module.scale = [torch.rsqrt(torch.tensor(2.0))]  # Gemma 4 has two such
    module.register_buffer("table", torch.arange(3.0))  # which SGLang's checker fills too
    refit = served(module, lambda _: None)
    refit.derived.kept_copies.keep_constants()
    for one in (module.a, module.scale[0], module.table):
        one.data.fill_(7)
    refit.derived.kept_copies.put_constants_back()
    assert torch.equal(module.scale[0], torch.rsqrt(torch.tensor(2.0)))
    assert (module.a == 7).all()
    assert torch.equal(module.table, torch.arange(3.0))
