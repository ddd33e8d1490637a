"""What can't compute as served is refused: which module, what was found, the rule, and what to do."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.plans import BLOCKWISE, PER_CHANNEL, PLAIN, make_plan
from support.trainer.served_models import server_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

from sglang_fp8rl.errors import QuantizationError, RefitError
from sglang_fp8rl.trainer.served_weights import (
    check_as_served,
    compute_as_served,
    compute_as_stored,
    fingerprint_of_served,
    modules,
    served_modules,
)
from sglang_fp8rl.trainer.served_weights.rules import ServedWeightsError

SHAPES = {
    "up.weight": (BLOCKWISE, (256, 128)),
    "up.bias": (PLAIN, (256,)),
    "down.weight": (PER_CHANNEL, (64, 256)),
    "norm.weight": (PLAIN, (64,)),
}


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256)
        self.down = nn.Linear(256, 64, bias=False)
        self.norm = nn.RMSNorm(64)

    def forward(self, x):
        return self.norm(self.down(self.up(x)))


def tiny():
    torch.manual_seed(0)
    return Tiny()


def run_tiny(model):
    model(torch.ones(1, 128))


def is_untouched(model):
    return not list(served_modules(model)) and type(model.up) is nn.Linear


def test_a_name_that_the_plan_does_not_know_and_nothing_is_swapped():
    model = tiny()
    model.score = nn.Linear(64, 1)
    with pytest.raises(ServedWeightsError, match=r"score\.weight: not in the plan.*not_served"):
        compute_as_served(model, make_plan(SHAPES))
    assert is_untouched(model)
    assert compute_as_served(model, make_plan(SHAPES), not_served=["score"]) == ["up", "down"]
    assert type(model.score) is nn.Linear
    assert "score.weight" not in fingerprint_of_served(model).numbers


def test_a_class_that_takes_no_subclass_and_nothing_is_swapped():
    class Final(nn.Linear):
        def __init_subclass__(cls):
            raise TypeError("Final takes no subclass")

    model = tiny()
    model.down = Final(256, 64, bias=False)  # behind `up`
    with pytest.raises(TypeError, match="Final"):
        compute_as_served(model, make_plan(SHAPES))
    assert is_untouched(model)


def test_not_served_names_no_module():
    with pytest.raises(ServedWeightsError, match=r"scor: in not_served, and no module"):
        compute_as_served(tiny(), make_plan(SHAPES), not_served=["scor"])


def test_another_shape_and_a_weight_that_the_model_has_not():
    model = tiny()
    for shapes, text in (
        (SHAPES | {"up.weight": (BLOCKWISE, (256, 256))}, r"up\.weight: shape \(256, 128\) in the"),
        (
            SHAPES | {"b.weight": (BLOCKWISE, (256, 256))},
            r"b\.weight: served in FP8 and not in the",
        ),
    ):
        with pytest.raises(ServedWeightsError, match=text):
            compute_as_served(model, make_plan(shapes))
        assert is_untouched(model)


def test_a_module_under_two_names_is_said_to_be_so():
    model = tiny()
    model.again = model.down
    plan = make_plan(SHAPES | {"again.weight": SHAPES["down.weight"]})
    with pytest.raises(
        ServedWeightsError, match=r"again\.weight: .*second name.*share a parameter"
    ):
        compute_as_served(model, plan)
    model.again = nn.Linear(256, 64, bias=False)
    model.again.weight = model.down.weight
    assert "again" in compute_as_served(model, plan)


def test_an_adapter_is_to_be_merged():
    model = tiny()
    model.up.lora_A = nn.Linear(128, 4, bias=False)
    with pytest.raises(
        ServedWeightsError, match=r"up\.lora_A\.weight.*adapter.*merge it before(?!.*not_served)"
    ):
        compute_as_served(model, make_plan(SHAPES))


def test_experts_of_several_rules():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = nn.Parameter(torch.zeros(2, 128, 128))

    model = nn.ModuleDict({"experts": Experts()})
    plan = make_plan(
        {
            "experts.0.down_proj.weight": (BLOCKWISE, (128, 128)),
            "experts.1.down_proj.weight": (PER_CHANNEL, (128, 128)),
        }
    )
    with pytest.raises(ServedWeightsError, match=r"experts\.down_proj: blocks .*ignored_layers"):
        compute_as_served(model, plan)


def test_a_model_that_is_swapped_already_or_not_yet():
    model, plan = tiny(), make_plan(SHAPES)
    with pytest.raises(ServedWeightsError, match="its own parameters"):
        compute_as_stored(model)
    compute_as_served(model, plan)
    changed = make_plan(SHAPES, use_weight_pow2_scale=True)
    for again in (plan, changed):
        with pytest.raises(ServedWeightsError, match=r"already.*compute_as_stored"):
            compute_as_served(model, again)
    with pytest.raises(ServedWeightsError, match="already"):
        compute_as_served(nn.Sequential(model), plan)
    compute_as_stored(model)
    compute_as_served(model, changed)


@pytest.mark.parametrize("where", ["parameters", "input", "autocast"])
def test_a_dtype_that_served_weights_are_rounded_in_again(where):
    model = tiny()
    compute_as_served(model, make_plan(SHAPES))
    x = torch.zeros(1, 128)
    if where == "parameters":
        model, x = model.half(), x.half()
    if where == "input":
        x = x.bfloat16()
    text = "comes to" if where == "input" else r"computed in torch\.float16"
    with (
        torch.autocast("cpu", torch.float16, enabled=where == "autocast"),
        pytest.raises(ServedWeightsError, match=rf"up\.weight: .*{text}"),
    ):
        model(x)


def test_a_weight_that_was_not_gathered(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = tiny()
        compute_as_served(model, make_plan(SHAPES))
        sharded = DTensor.from_local(model.up.weight.detach(), mesh, [Replicate()])
        model.up.weight = nn.Parameter(sharded)
        with pytest.raises(ServedWeightsError, match=r"up\.weight: a DTensor.*gathered"):
            model(torch.zeros(1, 128))
    finally:
        torch.distributed.destroy_process_group()


def test_a_weight_whose_memory_fsdp_has_freed_is_an_error_and_not_read():
    model = tiny()
    compute_as_served(model, make_plan(SHAPES))
    model.up.weight.untyped_storage().resize_(0)
    with pytest.raises(ServedWeightsError, match=r"up\.weight: its memory is not there; FSDP"):
        model(torch.zeros(1, 128))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.ones(1, 128, 128))

    def forward(self, x):
        return (x @ self.down_proj[0]).exp().add_(1)


def test_what_experts_overwrite_before_the_backward_pass_is_an_error_as_without_served_weights():
    model = nn.ModuleDict({"experts": Experts()})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model.experts(torch.ones(1, 128)).sum().backward()
    compute_as_served(model, make_plan({"experts.0.down_proj.weight": (BLOCKWISE, (128, 128))}))
    with pytest.raises(ServedWeightsError, match=r"shape \(1, 128\): changed in place 1 time"):
        model.experts(torch.ones(1, 128)).sum().backward()


def replicate(module, leaf):  # as DataParallel
    setattr(module._replicate_for_data_parallel(), leaf, torch.ones(1, 128, 128))


def parametrize_and_run(module, leaf):
    register_parametrization(module, leaf, nn.Identity())
    module(torch.ones(1, 128))


@pytest.mark.parametrize(
    "use", [partial(prune.random_unstructured, amount=1), replicate, parametrize_and_run]
)
def test_a_tensor_that_takes_the_place_of_experts_is_refused(use):
    model = nn.ModuleDict({"experts": Experts()})
    compute_as_served(model, make_plan({"experts.0.down_proj.weight": (BLOCKWISE, (128, 128))}))
    with pytest.raises(ServedWeightsError, match=r"experts\.down_proj: another tensor takes"):
        use(model.experts, "down_proj")


def test_a_weight_that_is_not_finite_shows_in_the_output_and_has_no_proof():
    model = tiny()
    compute_as_served(model, make_plan(SHAPES))
    with torch.no_grad():
        model.up.weight[3, 5] = torch.nan
    hidden = model.up(torch.ones(1, 128))
    assert hidden[0, 3].isnan()
    assert hidden[0, :3].isfinite().all()
    holds = SimpleNamespace(plan=lambda: make_plan(SHAPES), fingerprint=lambda: None)
    with pytest.raises(QuantizationError, match=r"up\.weight: NaN or Inf in block \(0, 0\)"):
        check_as_served(model, holds, run=run_tiny)


def test_the_proof_sees_a_bit_on_either_side(monkeypatch):
    model, plan = tiny(), make_plan(SHAPES)
    compute_as_served(model, plan)
    holds = server_of(model, plan)
    found = check_as_served(model, holds, run=run_tiny)
    assert found.compared == len(SHAPES) - 1
    assert found.unproven.keys() == {"up.bias"}  # FP32
    for name in SHAPES:
        parameter = model.get_parameter(name)
        kept = parameter.detach().clone()
        with torch.no_grad():  # the trainer's: the sign of the last one
            parameter.flatten()[-1].neg_()
        with pytest.raises(RefitError, match=f"{name}: .*have other bytes"):
            check_as_served(model, holds, run=run_tiny)
        with torch.no_grad():
            parameter.copy_(kept)
    assert check_as_served(model, holds, run=run_tiny).ok

    def one_bit_off(*args, **options):
        out = through(*args, **options)
        out.view(torch.int16)[-1, -1] ^= 1
        return out

    through = modules.through_fp8
    monkeypatch.setattr(modules, "through_fp8", one_bit_off)
    with pytest.raises(ServedWeightsError, match=r"up\.weight: 1 of 32768 values"):
        check_as_served(model, holds, run=run_tiny)


def test_the_server_s_plan_has_changed_or_shares_other_scales():
    model, plan = tiny(), make_plan(SHAPES)
    compute_as_served(model, plan)
    other = make_plan(SHAPES | {"down.weight": (PER_CHANNEL, (64, 256), 128)})
    with pytest.raises(ServedWeightsError, match=r"Tiny: it computes by the plan.*fetch_plan"):
        check_as_served(model, server_of(model, other), run=run_tiny)
    of_two_ranks = tiny()
    compute_as_served(of_two_ranks, other)
    with pytest.raises(ServedWeightsError, match=r"down\.weight: .*\[1,128\].*tensor-parallel"):
        check_as_served(model, server_of(of_two_ranks, plan), run=run_tiny)
