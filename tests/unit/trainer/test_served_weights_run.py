"""What a model really computes with is seen while it runs: by whom its modules are called, and who reads what."""

from __future__ import annotations

import pytest
import torch
from support.plans import BLOCKWISE, PER_CHANNEL, PLAIN, make_plan
from support.trainer.served_models import TOKENS, server_of, step, toy_model, toy_plan
from torch import nn

from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.trainer import fingerprint_of
from sglang_fp8rl.trainer.served_weights import (
    check_as_served,
    compute_as_served,
    compute_as_stored,
    fingerprint_of_served,
)
from sglang_fp8rl.trainer.served_weights.rules import ServedWeightsError

SHAPES = {
    "up.weight": (BLOCKWISE, (256, 128)),
    "up.bias": (PLAIN, (256,)),
    "down.weight": (PER_CHANNEL, (64, 256)),
}
X = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256)
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


def mlp(cls=Mlp):
    torch.manual_seed(0)
    model = cls()
    with torch.no_grad():
        model.up.bias.copy_(model.up.bias.bfloat16())
    return model


def check(model, run=lambda model: model(X), plan=None):
    return check_as_served(model, server_of(model, plan or make_plan(SHAPES)), run=run)


def as_served(model):
    compute_as_served(model, make_plan(SHAPES))
    return model


def test_a_model_that_computes_as_served_passes_whatever_it_is_given():
    found = check(as_served(mlp()))
    assert (found.compared, found.unproven) == (3, {})
    for family in ("qwen3", "qwen3_moe"):
        model, plan = toy_model(family), toy_plan(family)
        compute_as_served(model, plan)
        before, random = step(model), torch.get_rng_state()
        found = check(model, None, plan)
        assert found.compared == len(fingerprint_of_served(model).numbers)
        assert found.unproven == {}
        assert torch.equal(torch.get_rng_state(), random)
        assert all(
            torch.equal(a, b)
            for a, b in zip(step(model)[1].values(), before[1].values(), strict=True)
        )
        assert not any(
            module._forward_hooks or module._forward_pre_hooks for module in model.modules()
        )


def test_hooks_of_accelerate_are_refused_before_and_proven_behind_the_swap():
    hooks = pytest.importorskip("accelerate.hooks")
    model = mlp()
    hooks.add_hook_to_module(model.up, hooks.ModelHook())
    stored = model(X)
    with pytest.raises(
        ServedWeightsError, match=r"up: a forward was set on the module.*remove_hook_from_module"
    ):
        compute_as_served(model, make_plan(SHAPES))
    assert type(model.up) is nn.Linear
    hooks.remove_hook_from_module(model.up)
    as_served(model)
    served = model(X)
    hooks.add_hook_to_module(model.up, hooks.ModelHook())
    assert torch.equal(model(X), served)
    assert not torch.equal(served, stored)
    assert check(model).compared == 3
    with pytest.raises(ServedWeightsError, match=r"up: a forward was set .*call compute_as_stored"):
        compute_as_stored(model)
    hooks.remove_hook_from_module(model.up)
    compute_as_stored(model)
    assert torch.equal(model(X), stored)
    assert vars(model.up).keys() == vars(mlp().up).keys()


def test_what_a_hook_makes_of_a_state_dict_is_not_what_is_computed_with():
    def doubled(module, content, prefix, metadata):
        content.update({name: tensor * 2 for name, tensor in content.items()})

    model = as_served(mlp())
    held = fingerprint_of_served(model)
    model.register_state_dict_post_hook(doubled)
    more = model.register_state_dict_post_hook(lambda *args: args[1].update(more=torch.ones(3)))
    assert fingerprint_of_served(model) == held
    more.remove()
    saved = fingerprint_of(model.state_dict().items(), make_plan(SHAPES))
    with pytest.raises(RefitError, match=r"down\.weight: .* have other bytes"):
        check_as_served(
            model, server_of(model, make_plan(SHAPES), saved), run=lambda model: model(X)
        )


def test_a_forward_that_was_made_of_the_stored_class_is_seen_reading_the_stored_weight():
    hooks = pytest.importorskip("accelerate.hooks")
    model = as_served(mlp())
    hooks.add_hook_to_module(model.down, hooks.ModelHook())
    model.down._old_forward = nn.Linear.forward.__get__(model.down)
    with pytest.raises(
        ServedWeightsError,
        match=r"down\.weight: aten\.\w+\.default in down reads it as it is stored",
    ):
        check(model)


def test_a_forward_that_computes_with_a_copy_does_not_compute_with_the_parameter():
    model = as_served(mlp())
    copy = model.up.weight.detach().clone()
    for forward in (lambda x: nn.functional.linear(x, copy, model.up.bias), lambda x: x.tile(2)):
        model.up.forward = forward
        with pytest.raises(ServedWeightsError, match=r"up\.weight: the cast did not read it"):
            check(model)


@pytest.mark.parametrize("also_calls", [False, True])
@pytest.mark.parametrize(
    "view", [lambda w: w, lambda w: w[:, :64], lambda w: w.data, lambda w: w.detach().T.T]
)
def test_a_parent_that_reads_the_weight_is_named_with_it(view, also_calls):
    class Reads(Mlp):
        def forward(self, x):
            read = view(self.down.weight)
            hidden = self.up(x).relu()
            return nn.functional.linear(hidden[:, : read.shape[1]], read) + (
                self.down(hidden) if also_calls else 0
            )

    model = as_served(mlp(Reads))
    with pytest.raises(
        ServedWeightsError, match=r"down\.weight: aten\.\w+\.default in the model reads it as it is"
    ):
        check(model)


def test_a_parent_that_looks_at_dtype_and_shape_reads_nothing():
    class Looks(Mlp):
        def forward(self, x):
            assert x.to(self.down.weight.dtype).device == self.down.weight.detach().device
            return super().forward(x[:, : self.up.weight.shape[1]])

    assert check(as_served(mlp(Looks))).compared == 3


def test_torch_s_attention_reads_the_weight_of_its_projection():
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(128, 2, bias=False)})
    plan = make_plan(
        {
            "attention.in_proj_weight": (PLAIN, (384, 128)),
            "attention.out_proj.weight": (BLOCKWISE, (128, 128)),
        }
    )
    compute_as_served(model, plan)
    with pytest.raises(
        ServedWeightsError, match=r"attention\.out_proj\.weight: .* in attention reads it"
    ):
        check(model, lambda model: model["attention"](X, X, X), plan)


def test_a_module_that_does_not_run_and_a_model_that_can_t_be_called():
    model = as_served(mlp())
    with pytest.raises(ServedWeightsError, match=r"down\.weight: the cast did not read it; .*run="):
        check(model, lambda model: model.up(X))
    with pytest.raises(ServedWeightsError, match=r"Mlp: its forward takes no input_ids.*run="):
        check(model, None)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_computed_with_in_more_digits_than_served_is_named(autocast):
    """Norms and embeddings of an FP32 model; its head too, unless autocast rounds it."""
    plan, model = toy_plan("qwen3"), toy_model("qwen3", torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    compute_as_served(model, plan)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = check(model, None, plan)
    everything = fingerprint_of_served(model).numbers
    plain = {name for name in everything if plan.of(name).block_size is None}
    head = {"lm_head.weight"}
    assert set(found.unproven) == plain - (head if autocast else set())
    assert found.compared == len(everything) - len(found.unproven)
    assert all("read in torch.float32" in text for text in found.unproven.values())
    with torch.no_grad():
        for name in plain:
            parameter = model.get_parameter(name)
            parameter.copy_(parameter.bfloat16())
    assert check(model, None, plan).unproven == {}  # nothing is rounded


def test_fp32_masters_that_are_computed_with_in_bf16_are_rounded_as_served():
    model, plan = toy_model("qwen3", torch.float32), toy_plan("qwen3")
    compute_as_served(model, plan)

    def run(model):
        bf16 = {name: one.bfloat16() for name, one in model.named_parameters()}
        torch.func.functional_call(model, bf16, (TOKENS,))

    assert check(model, run, plan).unproven == {}


def test_fp32_masters_that_the_server_does_not_round_are_not_rounded_before_the_cast():
    model, plan = mlp(), make_plan(SHAPES, round_to_bf16=False)
    compute_as_served(model, plan)
    assert check(model, plan=plan).compared == 3

    def run(model):
        bf16 = {name: one.bfloat16() for name, one in model.named_parameters()}
        torch.func.functional_call(model, bf16, (X.bfloat16(),))

    text = r"up\.weight: .* reads it in torch\.bfloat16, kept in torch\.float32.*round_to_bf16"
    with pytest.raises(ServedWeightsError, match=text):
        check(model, run, plan)


def test_a_model_that_is_compiled_in_place_is_seen_as_it_computes():
    model = toy_model("qwen3")
    plan = toy_plan("qwen3")
    compute_as_served(model, plan)
    model.compile(backend="aot_eager")
    assert check(model, lambda model: model(input_ids=TOKENS), plan).compared
