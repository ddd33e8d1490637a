"""The aligned twin of a model computes what the model computes, and every linear layer is whole blocks."""

from __future__ import annotations

import pytest
import torch
from studies.real_model.aligned import BLOCK, aligned_model
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.mark.parametrize(("hidden", "heads", "kv_heads"), [(192, 3, 1), (576, 9, 3)])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_the_original_s_up_to_rounding(tmp_path, hidden, heads, kv_heads, tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    aligned_model(model).save_pretrained(tmp_path)
    twin = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.arange(24).reshape(2, 12) * 5 % 128
    with torch.no_grad():
        expected, found = model(ids).logits, twin(ids).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    linear = {n: p.shape for n, p in twin.named_parameters() if n.endswith("_proj.weight")}
    assert len(linear) == 14
    assert all(rows % BLOCK == columns % BLOCK == 0 for rows, columns in linear.values())
