"""Options that change bytes, on a running engine: each gives what the reference cast says."""

from __future__ import annotations

import pytest
import torch
from support.by_definition import quantize_blockwise
from support.engine.commands import parameter, status
from support.engine.contract import HOST, OLDEST
from support.engine.models import Model
from support.engine.options import overridden
from support.engine.pool import engine_key, on

pytestmark = pytest.mark.engine

THREE_LAYERS = Model("qwen3-three-layers", "qwen3", (("num_hidden_layers", 3),))
DOWN = "model.layers.1.mlp.down_proj"


def with_options(label, model="qwen3", **options):
    return engine_key(model, args=overridden(**options), label=label)


def update_and_compare(host):
    """Update an engine to the second weights and check that it equals a fresh one."""
    host.update_to("second", "first", "second")  # the last one is replayed
    host.check_fresh("second")


def schemes(host):
    return {row["module"]: (row["scheme"], row["reason"]) for row in host.call(status)["plan"]}


@pytest.mark.skipif(HOST == OLDEST, reason="this SGLang tells a method no depth to count from")
@on(with_options("ends", THREE_LAYERS, num_first_layers_in_bf16=1, num_last_layers_in_bf16=1))
def test_first_and_last_layers_stay_in_bf16(host):
    update_and_compare(host)
    found = schemes(host)
    for module, (scheme, reason) in found.items():
        layer = int(module.split(".")[2])
        assert scheme == ("blockwise" if layer == 1 else "high_precision"), module
        if layer != 1:
            assert f"num_{'first' if layer == 0 else 'last'}_layers_in_bf16: 1" in reason
    assert len(found) == 12


@on(with_options("not-converted", modules_to_not_convert=["model.layers.0.mlp"]))
def test_modules_to_not_convert_is_ignored_layers_by_its_other_name(host):
    plain = {module for module, (scheme, _) in schemes(host).items() if scheme == "high_precision"}
    assert plain == {"model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"}


CASTS = {
    "pow2": {"pow2_scale": True},
    "no-bf16": {"round_to_bf16": False},
    "both": {"pow2_scale": True, "round_to_bf16": False},
}


@on(
    with_options("both", use_weight_pow2_scale=True, round_to_bf16=False),
    slow=(
        with_options("pow2", use_weight_pow2_scale=True),
        with_options("no-bf16", round_to_bf16=False),
    ),
)
def test_an_option_of_the_cast_reaches_every_byte(host):
    update_and_compare(host)
    leaves = ("weight_scale_inv", "weight")
    scales, codes = (host.call(parameter, f"{DOWN}.{leaf}") for leaf in leaves)
    cast = CASTS[host.key.label]
    weight = host.model.second[f"{DOWN}.weight"]
    expected, expected_scales = quantize_blockwise(weight, **cast)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected.view(torch.uint8))
    plain, plain_scales = quantize_blockwise(weight)
    assert not (torch.equal(scales, plain_scales) and torch.equal(codes, plain.view(torch.uint8)))
    if "pow2_scale" in cast:
        assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5))
