"""The checkpoint: a small Qwen3 with a byte-level tokenizer that has `<|im_end|>`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from byte_tokenizer import save_tokenizer

from sglang_fp8rl.lab.testing.checkpoints import make_checkpoint
from verl_trainer.task import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS

END = "<|im_end|>"
VOCAB_SIZE = 261  # SGLang pads it to 320: the padded rows are no part of any refit


def make_model(path: Path) -> Path:
    """Write it to `path`: 2 layers, hidden size 256, FP32 on disk."""
    save_tokenizer(path)
    _add_token(path, END)
    return make_checkpoint(
        path,
        "qwen3",
        dtype=torch.float32,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4 * (MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS),
    )


def _add_token(path: Path, token: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path))
    tokenizer.add_special_tokens({"additional_special_tokens": [token]})
    tokenizer.save_pretrained(str(path))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 0}))
