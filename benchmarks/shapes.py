"""Real shape tables: every quantized weight of a model as it is sent, full and unsharded.

From the models' published `config.json`; a table is (name, rows, columns, count).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dense:
    """A decoder of which every layer is alike."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0

    def weights(self) -> list[tuple[str, int, int, int]]:
        """(name, rows, columns, how often)."""
        hidden, count = self.hidden, self.layers
        mlp = count * max(1, self.experts)
        return [
            ("q_proj", self.heads * self.head_dim, hidden, count),
            ("k_proj", self.kv_heads * self.head_dim, hidden, count),
            ("v_proj", self.kv_heads * self.head_dim, hidden, count),
            ("o_proj", hidden, self.heads * self.head_dim, count),
            ("gate_proj", self.intermediate, hidden, mlp),
            ("up_proj", self.intermediate, hidden, mlp),
            ("down_proj", hidden, self.intermediate, mlp),
        ]

    @property
    def elements(self) -> int:
        return sum(rows * cols * count for _, rows, cols, count in self.weights())

    @property
    def tensors(self) -> int:
        return sum(count for *_, count in self.weights())


MODELS = {
    "Qwen3-0.6B": Dense(28, 1024, 3072, 16, 8, 128),
    "Qwen3-8B": Dense(36, 4096, 12288, 32, 8, 128),
    "Llama-3.1-8B": Dense(32, 4096, 14336, 32, 8, 128),
    "Qwen3-30B-A3B": Dense(48, 2048, 768, 32, 4, 128, experts=128),
    "Qwen3-235B-A22B": Dense(94, 4096, 1536, 64, 4, 128, experts=128),
}

# Shards and sizes that real layouts come to and 128×128 blocks do not divide.
MISALIGNED = [
    ("64 KV rows per rank", 64, 4096),
    ("intermediate 1368", 1368, 576),
    ("hidden 576", 576, 576),
    ("expert shard 96", 96, 2048),
    ("11008 / 8", 1376, 4096),
]


def many_names(layers: int) -> Any:
    """A Qwen3-MoE with the experts of Qwen3-30B-A3B, and matrices of one block: names, and few bytes."""
    from sglang_fp8rl.lab.testing.checkpoints import make_config

    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    return make_config(
        "qwen3_moe", num_experts=128, num_hidden_layers=layers, vocab_size=256, **sizes, **heads
    )
