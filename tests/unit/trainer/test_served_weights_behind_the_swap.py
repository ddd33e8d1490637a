"""What becomes of a swapped model: modules replaced, autocast, buffers, one memory for all parameters, pickle."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from support.plans import BLOCKWISE, PER_CHANNEL, PLAIN, make_plan
from support.trainer.served_models import server_of
from torch import nn

from sglang_fp8rl.trainer.served_weights import (
    check_as_served,
    compute_as_served,
    compute_as_stored,
    fingerprint_of_served,
    plan_of,
)
from sglang_fp8rl.trainer.served_weights.rules import ServedWeightsError
from sglang_fp8rl.wire.plan import RefitPlan, digest_of

UP, DOWN = (256, 128), (128, 256)
X = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(2, *DOWN) / 16)

    def forward(self, x):
        return nn.functional.linear(x, self.down_proj[0]) + nn.functional.linear(
            x, self.down_proj[1]
        )


class Mlp(nn.Module):
    def __init__(self, down: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256, bias=False)
        self.down = down or nn.Linear(256, 128, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


def swapped(model, **shapes):
    """A model whose plan is of `up` and what else is said."""
    entries = {name.replace("__", "."): entry for name, entry in shapes.items()}
    compute_as_served(model, make_plan({"up.weight": (BLOCKWISE, UP)} | entries))
    return model


def check(model, held=None):
    """Against a server that holds what is expected, or these bytes."""
    server = server_of(model, plan_of(model), held)
    return check_as_served(model, server, run=lambda model: model(X.to(model.up.weight.dtype)))


@pytest.mark.parametrize("served", ["fp8 on the wire", "bf16 on the wire", "experts"])
def test_a_module_that_took_the_place_of_a_swapped_one_is_named(served):
    torch.manual_seed(0)
    if served == "experts":
        entry = (BLOCKWISE, DOWN)
        model = Mlp(Experts()).bfloat16()
        swapped(model, down__0__down_proj__weight=entry, down__1__down_proj__weight=entry)
        new, leaf = Experts(), "down_proj"
    else:
        ranks = 2 if served == "bf16 on the wire" else 1
        entry = (PER_CHANNEL, DOWN, 128) if ranks == 2 else (BLOCKWISE, DOWN)
        model = swapped(Mlp().bfloat16(), down__weight=entry)
        new, leaf = nn.Linear(256, 128, bias=False), "weight"
    held, before, plan = fingerprint_of_served(model), model(X), plan_of(model)
    assert check(model, held).ok
    setattr(new, leaf, getattr(model.down, leaf))
    model.down = new  # as torchao's convert_to_float8_training does
    assert not torch.equal(model(X), before)
    text = rf"down\.{leaf}: in a {type(new).__name__} that compute_as_served .*compute_as_stored"
    with pytest.raises(ServedWeightsError, match=text):
        check(model, held)
    with pytest.raises(ServedWeightsError, match=text):
        fingerprint_of_served(model)
    compute_as_stored(model)
    compute_as_served(model, plan)
    assert check(model, held).ok
    assert torch.equal(model(X), before)


def test_a_module_that_is_swapped_by_another_plan_is_no_better():
    model = swapped(Mlp().bfloat16(), down__weight=(BLOCKWISE, DOWN))
    other = swapped(Mlp().bfloat16(), down__weight=(PER_CHANNEL, DOWN))
    model.down = other.down
    with pytest.raises(ServedWeightsError, match=r"down\.weight: in a ServedLinear that"):
        check(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_to_fp16_is_refused_by_experts_as_by_linear_modules(dtype):
    model = nn.ModuleDict({"experts": Experts()})
    names = [f"experts.{expert}.down_proj.weight" for expert in range(2)]
    compute_as_served(model, make_plan(dict.fromkeys(names, (BLOCKWISE, DOWN))))
    with torch.autocast("cpu", dtype):
        if dtype is torch.bfloat16:
            assert model["experts"](torch.ones(1, 256)).dtype is dtype
            return
        with pytest.raises(ServedWeightsError, match=r"experts\.down_proj: computed in .*float16"):
            model["experts"](torch.ones(1, 256))


def test_a_swapped_linear_module_takes_what_comes_in_by_the_name_that_torch_has_for_it():
    model = swapped(Mlp().bfloat16(), down__weight=(BLOCKWISE, DOWN))
    assert torch.equal(model.up(input=X), model.up(X))


class Router(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.full((128,), 1.0009765625))
        self.register_buffer("unused", torch.full((128,), 1.0009765625))
        self.register_buffer("cache", torch.full((128,), 1.0009765625), persistent=False)

    def forward(self, x):
        return super().forward(x) + self.bias + self.unused + self.cache


def test_a_persistent_buffer_that_is_computed_with_in_more_digits_than_served_is_named():
    """Not one that no parameter of the server takes, nor one that is not in the state dict."""
    plan = make_plan(
        {"up.weight": (BLOCKWISE, UP), "down.weight": (BLOCKWISE, DOWN)}
        | dict.fromkeys(("bias", "unused"), (PLAIN, (128,)))
    )
    document = plan.as_dict()
    document["tensors"]["unused"] |= {"shape": None, "scheme": "unused", "wire": {"dtype": "any"}}
    plan = RefitPlan.from_dict(document | {"digest": digest_of(document)})
    model = Router()
    compute_as_served(model, plan)
    found = check(model)
    assert (found.compared, found.unproven.keys()) == (2, {"bias"})
    assert "read in torch.float32" in found.unproven["bias"]
    model.bias.fill_(1.0)
    assert (check(model).compared, check(model).unproven) == (3, {})


class Reads(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(128, eps=1e-6)
        self.also = self.rows = False

    def forward(self, x):
        hidden = self.up(x).relu()
        out = self.norm(self.down(hidden))
        if self.rows:
            out = out[:, :64] + nn.functional.linear(hidden, self.down.weight[64:])
        return out + nn.functional.linear(hidden, self.down.weight) if self.also else out


@pytest.mark.parametrize("flat", [False, True])
def test_parameters_that_lie_in_one_memory_are_told_apart(flat):
    torch.manual_seed(0)
    model = Reads().bfloat16()
    if flat:
        memory, at = torch.cat([one.detach().flatten() for one in model.parameters()]), 0
        for one in model.parameters():
            one.data = memory[at : at + one.numel()].view(one.shape)
            at += one.numel()
    swapped(model, down__weight=(BLOCKWISE, DOWN), norm__weight=(PLAIN, (128,)))
    assert (check(model).compared, check(model).unproven) == (3, {})
    for switch in ("also", "rows"):
        setattr(model, switch, True)
        with pytest.raises(
            ServedWeightsError, match=r"down\.weight: aten\.\w+\.default in the mod"
        ):
            check(model)
        setattr(model, switch, False)


class Counts(Mlp):
    """Counts in place, and by a buffer that takes the place of one."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(256, 128, bias=False), nn.BatchNorm1d(128)))
        self.down[1].register_buffer("num_batches_tracked", torch.zeros(1))
        self.register_buffer("steps", torch.zeros(1))
        self.fails = False

    def forward(self, x):
        self.steps = self.steps + 1
        out = super().forward(x)
        if self.fails:
            raise ZeroDivisionError
        return out


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_counts_in_train_mode_is_proven_and_has_not_counted(fails):
    model = Counts()
    names = [name for name, one in model.state_dict().items() if one.dim() == 1]
    shapes = {name.replace(".", "__"): (PLAIN, model.state_dict()[name].shape) for name in names}
    swapped(model, down__0__weight=(BLOCKWISE, DOWN), **shapes)
    before, buffers = copy.deepcopy(model.state_dict()), dict(model.named_buffers())
    model.fails = fails
    if fails:
        with pytest.raises(ZeroDivisionError):
            check(model)
    else:
        assert check(model).compared == len(names) + 2
    assert model.training
    assert all(one is buffers[name] for name, one in model.named_buffers())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [by_torch_save, copy.deepcopy])
def test_a_swapped_model_that_is_saved_whole_or_copied_computes_as_served(copied):
    torch.manual_seed(0)
    model = Mlp(Experts()).bfloat16()
    stored, entry = model(X), (BLOCKWISE, DOWN)
    swapped(model, down__0__down_proj__weight=entry, down__1__down_proj__weight=entry)
    again = copied(model)
    assert torch.equal(again(X), model(X))
    assert check(again, fingerprint_of_served(model)).ok
    compute_as_stored(again)
    assert (type(again.up), type(again.down)) == (nn.Linear, Experts)
    assert torch.equal(again(X), stored)
