"""Copies that SGLang keeps of a weight, made by its real classes, follow the weight in place."""

from __future__ import annotations

import pytest
import torch

from sglang_fp8rl.engine.model.kept_copies import KeptCopies

pytestmark = pytest.mark.engine


def follows(model, weight, copy):
    """Whether the copy has the weight's new values after a renewal, and had not before."""
    kept = copy()
    address = kept.data_ptr()
    weight.data.add_(1.0)  # as SGLang's loaders write
    assert not torch.equal(kept, weight.to(kept.dtype))
    KeptCopies(model).renew()
    assert kept.data_ptr() == address
    return copy() is kept and torch.equal(kept, weight.to(kept.dtype))


def test_the_correction_bias_in_the_dtype_of_the_router():
    from sglang.srt.layers.moe.topk import TopKConfig

    if not hasattr(TopKConfig, "correction_bias_for_dtype"):
        pytest.skip("this SGLang keeps no such copy")
    model = torch.nn.Sequential(torch.nn.Identity())
    bias = torch.nn.Parameter(torch.randn(8), requires_grad=False)
    config = TopKConfig(top_k=2, correction_bias=bias)
    model[0].topk_config = config
    assert follows(model, bias, lambda: config.correction_bias_for_dtype(torch.bfloat16))


@pytest.mark.parametrize("module", ["glm4_moe.Glm4MoeGate", "glm4_moe_lite.Glm4MoeLiteGate"])
def test_the_fp32_copy_of_a_gate(module):
    import importlib
    from types import SimpleNamespace

    file, _, name = module.partition(".")
    gate_class = getattr(importlib.import_module(f"sglang.srt.models.{file}"), name)
    config = SimpleNamespace(n_routed_experts=4, hidden_size=16)
    model = torch.nn.Sequential(gate_class(config)).to(torch.bfloat16)
    gate = model[0]
    gate.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    if not hasattr(gate, "_weight_fp32"):
        pytest.skip("this SGLang keeps no such copy")
    gate(torch.ones(1, 16, dtype=torch.bfloat16))
    assert follows(model, gate.weight, lambda: gate._weight_fp32)
