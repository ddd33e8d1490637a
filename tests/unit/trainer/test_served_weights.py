"""A model that computes as served is the model whose parameters are the served weights, bit for bit."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from support.plans import BLOCKWISE, PER_CHANNEL, PLAIN, make_plan
from support.trainer.served_models import step, toy_model, toy_plan, with_served_parameters
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from sglang_fp8rl.trainer.served_weights import (
    compute_as_served,
    compute_as_stored,
    plan_of,
)
from sglang_fp8rl.trainer.served_weights.rules import ServedWeightsError

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


@pytest.mark.parametrize("kind", MODELS)
def test_fp32_parameters_compute_with_the_same_weights_in_fp32_and_under_autocast(kind):
    family, overrides = MODELS[kind]
    model, plan = toy_model(family, torch.float32, **overrides), toy_plan(family, **overrides)
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


def test_on_meta_it_has_the_shapes_of_a_plain_model():
    """Its outputs' shapes, without memory; torch knows no autocast there."""
    model = toy_model("qwen3").to("meta")
    tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    expected = model(input_ids=tokens).logits.shape
    compute_as_served(model, toy_plan("qwen3"))
    assert model(input_ids=tokens).logits.shape == expected


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
    resumed = copy.deepcopy(model)
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


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_step_keeps_no_served_weight(model_and_plan, is_frozen):
    """Between forward and backward there is what a plain step keeps, and no served weight."""
    model, plan = model_and_plan
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen or "embed" in name)
    expected = held_between(model)
    compute_as_served(model, plan)
    assert held_between(model) <= expected


class Made(TorchDispatchMode):
    """What was made while it lasted, for as long as somebody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage)
        return out

    def held(self) -> int:
        """Bytes of what is still there."""
        gc.collect()
        there = (one for one in self.storages.values() if not one.expired())
        return sum(torch.UntypedStorage._new_with_weak_ptr(one.cdata).nbytes() for one in there)


def held_between(model: nn.Module) -> int:
    """Bytes of all that a forward pass made and holds behind it; then a backward pass lets go of it."""
    with Made() as made:
        out = model(input_ids=torch.arange(24)[None], use_cache=False)
    held = made.held()
    out.logits.float().sum().backward()
    model.zero_grad()
    return held


class ToyExperts(nn.Module):
    """Two experts in one tensor; one result is returned, one is kept, and a part can be checkpointed."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(2, 128, 256).bfloat16() / 16)
        self.checkpointed = checkpointed
        self.kept = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.one(x, 0)
        self.kept = first.float().square().mean()
        if self.checkpointed:
            return first + checkpoint(self.one, x, 1, use_reentrant=False)
        return first + self.one(x, 1)

    def one(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return nn.functional.linear(x, self.down_proj[expert])


def toy_experts(**options):
    """A model of these alone, its plan, what comes in, and the same with served parameters."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": ToyExperts(**options)})})
    names = [f"mlp.experts.{expert}.down_proj.weight" for expert in range(2)]
    plan = make_plan(dict.fromkeys(names, (BLOCKWISE, (128, 256))))
    expected = with_served_parameters(copy.deepcopy(model), plan)
    compute_as_served(model, plan)
    return model["mlp"].experts, expected["mlp"].experts, torch.randn(4, 256).bfloat16()


def gradients_of(experts, x, *, kept_first):
    """Of what was returned, and of what was kept, in this order or the other."""
    x = x.clone().requires_grad_()
    out = experts(x)
    losses = [out.float().square().mean(), experts.kept]
    for loss in reversed(losses) if kept_first else losses:
        loss.backward(retain_graph=True)
    return x.grad, experts.down_proj.grad


@pytest.mark.parametrize("kept_first", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_loss_of_what_experts_keep_and_a_part_that_computes_again(checkpointed, kept_first):
    experts, expected, x = toy_experts(checkpointed=checkpointed)
    found = gradients_of(experts, x, kept_first=kept_first)
    for grad, other in zip(found, gradients_of(expected, x, kept_first=kept_first), strict=True):
        assert torch.equal(grad, other)


def test_experts_that_change_between_forward_and_backward_are_refused_as_linear_weights_are():
    experts, _, x = toy_experts()
    loss = experts(x.requires_grad_()).float().square().mean()
    with torch.no_grad():
        experts.down_proj.mul_(2)
    with pytest.raises(
        ServedWeightsError, match=r"mlp\.experts\.down_proj: changed in place 1 time"
    ):
        loss.backward()


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_gradients_are_of_the_weight_that_was_computed_with_whatever_data_the_parameter_has_since(
    kind,
):
    experts, _, x = toy_experts()
    linear = nn.ModuleDict({"up": nn.Linear(256, 128)}).bfloat16()
    compute_as_served(
        linear, make_plan({"up.weight": (BLOCKWISE, (128, 256)), "up.bias": (PLAIN, (128,))})
    )
    module = experts if kind == "experts" else linear["up"]
    grads = []
    for is_replaced in (False, True):
        out = module(x.requires_grad_())
        if is_replaced:
            vector_to_parameters(parameters_to_vector(module.parameters()) * 2, module.parameters())
        grads += torch.autograd.grad(out.float().square().sum(), x)
    assert torch.equal(*grads)


def test_experts_compute_in_chunks_by_calling_themselves():
    *both, x = toy_experts()
    for one in both:
        plain = one.one
        one.one = lambda x, expert, whole=one, plain=plain: (
            torch.cat([whole(part) for part in x.split(2)]) if len(x) > 2 else plain(x, expert)
        )
    grads = [gradients_of(one, x, kept_first=False) for one in both]
    assert all(map(torch.equal, *grads))


def test_experts_of_one_module_compute_in_two_threads_at_a_time():
    experts, expected, x = toy_experts()
    plain, both_compute = experts.one, Barrier(2)
    experts.one = lambda x, expert: both_compute.wait(10) * 0 + plain(x, expert)
    with ThreadPoolExecutor(2) as threads:
        outputs = list(threads.map(experts, [x, x]))
    assert all(torch.equal(one, expected(x)) for one in outputs)


def test_experts_that_compute_in_threads_of_their_own_are_refused():
    experts, _, x = toy_experts()
    plain = experts.one
    with ThreadPoolExecutor(1) as thread:
        experts.one = lambda *args: thread.submit(plain, *args).result()
        with pytest.raises(ServedWeightsError, match="read by another thread"):
            experts(x)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_hook_of_the_backward_pass_updates_the_parameter_of_experts_by_its_attribute(
    checkpointed,
):
    experts, _, x = toy_experts(checkpointed=checkpointed)
    before = experts.down_proj.detach().clone()

    @torch.no_grad()
    def update(parameter):
        experts.down_proj.sub_(parameter.grad)

    experts.down_proj.register_post_accumulate_grad_hook(update)
    experts(x).float().sum().backward()
    assert torch.equal(experts.down_proj, before - experts.down_proj.grad)


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
