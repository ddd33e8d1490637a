"""Checkpoints of the law tests: each model with two sets of weights, as two steps of training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sglang_fp8rl.lab.testing.checkpoints import (
    make_config,
    make_state_dict,
    perturbed,
    save_checkpoint,
)

StateDict = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """One architecture and its layout-relevant sizes."""

    name: str
    family: str
    overrides: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def config(self) -> Any:
        return make_config(self.family, **dict(self.overrides))

    @cached_property
    def first(self) -> StateDict:
        return make_state_dict(self.config, seed=0)

    @cached_property
    def second(self) -> StateDict:
        return perturbed(self.first, seed=1)


# Two KV heads of 64 rows on each of two ranks: every module is made of whole blocks, sharded or not.
ALIGNED = (("num_key_value_heads", 4),)

MODELS = {
    model.name: model
    for model in (
        Model("qwen3", "qwen3"),
        Model("qwen2-bias", "qwen2"),
        Model("llama", "llama"),
        Model("qwen3-tied", "qwen3", (("tie_word_embeddings", True),)),
        Model("qwen3-moe", "qwen3_moe"),
        Model("mixtral", "mixtral", ALIGNED),
        Model("mistral", "mistral", ALIGNED),
        # Tied, as all of them are: SGLang's Gemma 3 loads no head of its own.
        Model("gemma3", "gemma3_text", (*ALIGNED, ("tie_word_embeddings", True))),
        Model("phi3", "phi3", ALIGNED),
        Model("qwen2-moe", "qwen2_moe", ALIGNED),
        Model("glm4-moe", "glm4_moe", ALIGNED),
        Model("deepseek-v3", "deepseek_v3"),
        # Without q_lora_rank, as DeepSeek-V2-Lite: nothing is fused while it is loaded.
        Model("deepseek-lite", "deepseek_v3", (("q_lora_rank", None),)),
        # 96 rows per head in kv_b_proj, as odd as GLM-4.7-Flash's 448: misaligned at TP=2 only.
        Model("deepseek-misaligned", "deepseek_v3", (("v_head_dim", 32),)),
        Model("qwen2.5-vl", "qwen2_5_vl", ALIGNED),
        Model("qwen3-vl", "qwen3_vl"),
        Model("apertus", "apertus", ALIGNED),
        Model("gpt-oss", "gpt_oss"),
        # At TP=2 every expert's shard has 96 columns.
        Model("qwen3-moe-misaligned", "qwen3_moe", (("moe_intermediate_size", 192),)),
        # One KV head of 128 rows: at TP=2 both ranks hold it, and every shard is aligned.
        Model(
            "qwen3-one-kv-head",
            "qwen3",
            (("num_attention_heads", 2), ("num_key_value_heads", 1), ("head_dim", 128)),
        ),
        # Nothing but the output dimensions of o_proj and down_proj is a multiple of a block.
        Model(
            "llama-misaligned",
            "llama",
            (
                ("hidden_size", 576),
                ("intermediate_size", 1368),
                ("num_attention_heads", 8),
                ("num_key_value_heads", 4),
                ("head_dim", 64),
            ),
        ),
    )
}


def checkpoint(directory: Path, model: Model, which: str, **options: Any) -> Path:
    """Write one set of weights (`first` or `second`) once, and return its directory."""
    path = directory / "-".join([model.name, which, *map(str, options.values())])
    if not (path / "config.json").exists():
        save_checkpoint(path, model.config, getattr(model, which), **options)
    return path
