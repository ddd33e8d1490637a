"""Options that change bytes, on a running engine: each gives what the reference cast says."""

from __future__ import annotations

import pytest
import torch
from _options import overridden
from commands import digests, parameter, status, update
from contract import HOST, OLDEST
from engine_host import EngineHost
from generation import generate
from models import MODELS, Model, checkpoint

from sglang_fp8rl.numerics.reference import quantize_blockwise

pytestmark = pytest.mark.engine

THREE_LAYERS = Model("qwen3-three-layers", "qwen3", (("num_hidden_layers", 3),))
PROMPT = [5, 6, 7, 8]
DOWN = "model.layers.1.mlp.down_proj"


def updated(checkpoint_dir, model, options, look):
    """`look(host)` of an engine that was updated, after checking that it equals a fresh one."""
    args = overridden(**options)
    with EngineHost(checkpoint(checkpoint_dir, model, "second"), args=args) as fresh:
        expected, said = fresh.call(digests), fresh.call(generate, PROMPT, 3)
    with EngineHost(checkpoint(checkpoint_dir, model, "first"), args=args) as host:
        for which in ("second", "first", "second"):  # the last one is replayed
            ok, message = host.call(update, list(getattr(model, which).items()))
            assert ok, message
        assert host.call(digests) == expected
        assert host.call(generate, PROMPT, 3) == said
        return look(host)


def schemes(host):
    return {row["module"]: (row["scheme"], row["reason"]) for row in host.call(status)["plan"]}


@pytest.mark.skipif(HOST == OLDEST, reason="this SGLang tells a method no depth to count from")
def test_first_and_last_layers_stay_in_bf16(checkpoint_dir):
    options = {"num_first_layers_in_bf16": 1, "num_last_layers_in_bf16": 1}
    found = updated(checkpoint_dir, THREE_LAYERS, options, schemes)
    for module, (scheme, reason) in found.items():
        layer = int(module.split(".")[2])
        assert scheme == ("blockwise" if layer == 1 else "high_precision"), module
        if layer != 1:
            assert f"num_{'first' if layer == 0 else 'last'}_layers_in_bf16: 1" in reason
    assert len(found) == 12


def test_modules_to_not_convert_is_ignored_layers_by_its_other_name(checkpoint_dir):
    options = {"modules_to_not_convert": ["model.layers.0.mlp"]}
    found = updated(checkpoint_dir, MODELS["qwen3"], options, schemes)
    plain = {module for module, (scheme, _) in found.items() if scheme == "high_precision"}
    assert plain == {"model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"}


def scales_and_codes(host):
    leaves = ("weight_scale_inv", "weight")
    return tuple(host.call(parameter, f"{DOWN}.{leaf}") for leaf in leaves)


@pytest.mark.parametrize(
    ("option", "cast"),
    [
        ({"use_weight_pow2_scale": True}, {"pow2_scale": True}),
        ({"round_to_bf16": False}, {"round_to_bf16": False}),
        ({"use_weight_pow2_scale": True, "round_to_bf16": False}, None),
    ],
    ids=["pow2", "no-bf16", "both"],
)
def test_an_option_of_the_cast_reaches_every_byte(checkpoint_dir, option, cast):
    model = MODELS["qwen3"]
    scales, codes = updated(checkpoint_dir, model, option, scales_and_codes)
    cast = {"pow2_scale": True, "round_to_bf16": False} if cast is None else cast
    weight = model.second[f"{DOWN}.weight"]
    expected, expected_scales = quantize_blockwise(weight, **cast)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected.view(torch.uint8))
    plain, plain_scales = quantize_blockwise(weight)
    assert not (torch.equal(scales, plain_scales) and torch.equal(codes, plain.view(torch.uint8)))
    if "use_weight_pow2_scale" in option:
        assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5))
