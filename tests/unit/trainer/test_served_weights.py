"""A model that computes as served is the model whose parameters are the served weights, bit for bit."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from plans import BLOCKWISE, PER_CHANNEL, PLAIN, make_plan
from served_models import step, toy_model, toy_plan, with_served_parameters
from torch import nn

from sglang_fp8rl.trainer.served_weights import (
    compute_as_served,
    compute_as_stored,
    plan_of,
)

MODELS = {
    "dense": ("qwen3", {}),
    "biases": ("qwen2", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {}),
}


@pytest.fixture(params=MODELS)
def model_and_plan(request):
    family, overrides = MODELS[request.param]
    return toy_model(family, **overrides), toy_plan(family, **overrides)


def assert_same(found, expected):
    (logits, grads), (expected_logits, expected_grads) = found, expected
    assert torch.equal(logits, expected_logits)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, expected_grads[name]), name


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("pow2", [False, True])
def test_forward_and_gradients_are_those_of_the_served_weights(tp_size, pow2):
    model, plan = toy_model("qwen3"), toy_plan("qwen3", tp_size, pow2=pow2)
    expected = step(with_served_parameters(copy.deepcopy(model), plan))
    plain = step(model)
    assert not torch.equal(plain[0], expected[0])
    swapped = compute_as_served(model, plan)
    assert len(swapped) == 7
    assert plan_of(model) is plan
    assert_same(step(model), expected)


def test_it_is_so_for_biases_tied_embeddings_and_experts(model_and_plan):
    model, plan = model_and_plan
    expected = step(with_served_parameters(copy.deepcopy(model), plan))
    compute_as_served(model, plan)
    assert_same(step(model), expected)
    assert_same(step(model), expected)  # what is lent to one step is there in the next


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("pow2", [False, True])
def test_experts_whatever_computes_them(implementation, pow2):
    model, plan = toy_model("qwen3_moe"), toy_plan("qwen3_moe", 2, pow2=pow2)
    model.set_experts_implementation(implementation)
    expected = step(with_served_parameters(copy.deepcopy(model), plan))
    compute_as_served(model, plan)
    assert_same(step(model), expected)


def test_fp32_parameters_compute_with_the_same_weights_in_fp32_and_under_autocast(model_and_plan):
    _, plan = model_and_plan
    family = plan_family(plan)
    tied = "lm_head.weight" not in plan.tensors
    model = toy_model(family, torch.float32, **({"tie_word_embeddings": True} if tied else {}))
    reference = with_served_parameters(copy.deepcopy(model), plan)
    expected = step(reference)
    compute_as_served(model, plan)
    assert_same(step(model), expected)
    with torch.autocast("cpu", torch.bfloat16):
        (logits, grads), (expected_logits, expected_grads) = step(model), step(reference)
    assert torch.equal(logits, expected_logits)
    for name, grad in grads.items():
        # autocast rounds a product's gradient elsewhere
        torch.testing.assert_close(grad, expected_grads[name], rtol=0.02, atol=0.02)


def plan_family(plan):
    if any(".experts." in name for name in plan.tensors):
        return "qwen3_moe"
    return "qwen2" if any(name.endswith("bias") for name in plan.tensors) else "qwen3"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(model_and_plan, use_reentrant):
    model, plan = model_and_plan
    compute_as_served(model, plan)
    expected = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train()
    assert model.is_gradient_checkpointing
    assert_same(step(model), expected)


def test_names_parameters_and_optimizer_are_the_model_s_own(model_and_plan):
    model, plan = model_and_plan
    names, parameters = list(model.state_dict()), dict(model.named_parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compute_as_served(model, plan)
    assert list(model.state_dict()) == names
    assert all(p is parameters[name] for name, p in model.named_parameters())
    step(model)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    first = model(input_ids=torch.arange(8)[None]).logits
    optimizer.step()
    assert not torch.equal(model(input_ids=torch.arange(8)[None]).logits, first)

    resumed = toy_model(
        model.config.model_type, tie_word_embeddings=model.config.tie_word_embeddings
    )
    compute_as_served(resumed, plan)
    resumed.load_state_dict(before)  # saved without served weights
    assert torch.equal(resumed(input_ids=torch.arange(8)[None]).logits, first)


def test_swapped_back_the_model_is_what_it_was(model_and_plan):
    model, plan = model_and_plan
    classes = {name: type(module) for name, module in model.named_modules()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    expected = step(model)
    compute_as_served(model, plan)
    step(model)
    compute_as_stored(model)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert_same(step(model), expected)


def test_a_step_keeps_no_served_weight(model_and_plan):
    """Between forward and backward there is what a plain step keeps, and no other tensor of a weight's size."""
    model, plan = model_and_plan
    expected = held_between(model)
    compute_as_served(model, plan)
    assert held_between(model) <= expected


def held_between(model: nn.Module) -> int:
    """Bytes of all tensors that are not parameters after a forward pass, those saved for backward included."""
    gc.collect()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage  # sized when all is saved
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(input_ids=torch.arange(24)[None], use_cache=False)
    total = sum(storage.nbytes() for storage in saved.values())
    out.logits.float().sum().backward()
    model.zero_grad()
    return total


def test_a_frozen_weight_passes_its_gradient_on(model_and_plan):
    model, plan = model_and_plan
    expected_model = with_served_parameters(copy.deepcopy(model), plan)
    for one in (model, expected_model):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_("embed" in name or "norm" in name)
    compute_as_served(model, plan)
    assert_same(step(model), step(expected_model))


def test_two_backward_passes_of_one_graph(model_and_plan):
    model, plan = model_and_plan
    compute_as_served(model, plan)
    loss = model(input_ids=torch.arange(8)[None], use_cache=False).logits.float().square().sum()
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    loss.backward()
    for name, grad in once.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, 2 * grad)


def test_linear_modules_compile_into_one_graph():
    class Mlp(nn.Sequential):
        pass

    torch.manual_seed(0)
    model = Mlp(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128, bias=False)).bfloat16()
    plan = make_plan(
        {
            "0.weight": (BLOCKWISE, (256, 128)),
            "0.bias": (PLAIN, (256,)),
            "2.weight": (PER_CHANNEL, (128, 256), 128),
        }
    )
    compute_as_served(model, plan)
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    results = []
    for one in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        out = one(x)
        out.float().square().sum().backward()
        results.append((out.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert_same(results[1], results[0])


def test_experts_are_a_break_in_a_compiled_graph():
    model, plan = toy_model("qwen3_moe"), toy_plan("qwen3_moe")
    compute_as_served(model, plan)
    experts = model.model.layers[0].mlp.experts
    inputs = (
        torch.ones(4, 256, dtype=torch.bfloat16),
        torch.tensor([[0, 1]] * 4),
        torch.ones(4, 2),
    )
    expected = experts(*inputs)

    def doubled(*inputs):
        return experts(*inputs) * 2

    assert torch.equal(torch.compile(doubled, backend="aot_eager")(*inputs), expected * 2)
