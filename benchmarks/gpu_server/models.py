"""Real configurations without their checkpoints: `config.json`, the names sent, and values for them."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from block_fp8 import BLOCK_FP8_CONFIG, quantized_names
from shapes import MODELS, Dense

from sglang_fp8rl import quantize_blockwise
from sglang_fp8rl.lab.testing.families import hub_config, hub_shapes, make_config
from sglang_fp8rl.wire.bucket import NamedTensor, aligned

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}


@dataclass(frozen=True)
class Model:
    """What is served.

    Attributes:
        sizes: of `shapes.py`, or None for the tiny one of a smoke run.
        more: what `config.json` says beyond them.
        id: of the refit benchmark in the list of targets.
    """

    name: str
    family: str
    sizes: Dense | None
    more: dict[str, Any] = field(default_factory=dict)
    id: str = "G6"

    def config(self) -> Any:
        """The `transformers` configuration."""
        sizes = self.sizes
        if sizes is None:
            return make_config(self.family, **self.more)
        found = {
            "num_hidden_layers": sizes.layers,
            "hidden_size": sizes.hidden,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "intermediate_size": sizes.intermediate,
        }
        if sizes.experts:
            found |= {"num_experts": sizes.experts, "moe_intermediate_size": sizes.intermediate}
        return make_config(self.family, **{**_QWEN3, **found, **self.more})


REAL = {
    "qwen3-0.6b": Model(
        "qwen3-0.6b", "qwen3", MODELS["Qwen3-0.6B"], {"tie_word_embeddings": True}
    ),
    "qwen3-8b": Model("qwen3-8b", "qwen3", MODELS["Qwen3-8B"]),
    "qwen3-30b-a3b": Model(
        "qwen3-30b-a3b", "qwen3_moe", MODELS["Qwen3-30B-A3B"],
        {**_MOE, "intermediate_size": 6144}, "G7",
    ),
}  # fmt: skip
TINY = Model("tiny", "qwen3", None)


@dataclass(frozen=True)
class Layout:
    """Every tensor that is sent, by its name on the hub, and which of them are quantized."""

    shapes: dict[str, tuple[int, ...]]
    quantized: frozenset[str]
    vocab_size: int

    @classmethod
    def of(cls, config: Any) -> Layout:
        shapes = hub_shapes(config)
        on_meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return cls(shapes, frozenset(quantized_names(on_meta)), config.vocab_size)

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    def nbytes(self, fp8: bool) -> int:
        """What a server holds of it."""
        small = sum(math.prod(self.shapes[name]) for name in self.quantized) if fp8 else 0
        return 2 * self.elements - small

    def smallest(self) -> str:
        """A name that costs next to nothing to send."""
        return min(self.shapes, key=lambda name: (math.prod(self.shapes[name]), name))


def write_config(path: Path, config: Any, *, fp8: bool) -> Path:
    """A model folder that holds a `config.json` only, for `--load-format dummy`."""
    path.mkdir(parents=True)
    content = hub_config(config)
    if fp8:
        content["quantization_config"] = BLOCK_FP8_CONFIG
    (path / "config.json").write_text(json.dumps(content, indent=2))
    return path


class Values:
    """BF16 values for every tensor of a layout; two seeds give two weight sets.

    Matrices are views into one pool of normal numbers, so a whole model costs no memory of its own
    and nothing has to be made while a refit is timed. Where a view starts depends on seed and name.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        largest = max(map(math.prod, layout.shapes.values()))
        generator = torch.Generator(device).manual_seed(0)
        size = largest + (1 << 20)
        self.pool = torch.empty(size, dtype=torch.bfloat16, device=device)
        self.pool.normal_(0, 0.02, generator=generator)

    def tensor(self, name: str, seed: int) -> torch.Tensor:
        shape = self.layout.shapes[name]
        count = math.prod(shape)
        start = zlib.crc32(f"{seed} {name}".encode()) % (len(self.pool) - count)
        start -= start % 8  # 16 bytes, as a tensor of its own would be aligned
        view = self.pool[start : start + count].view(shape)
        return 1 + view if name.endswith("norm.weight") else view

    def unquantized(self, seed: int) -> list[NamedTensor]:
        return [(name, self.tensor(name, seed)) for name in self.layout.shapes]

    def pairs(self, seed: int) -> list[NamedTensor]:
        """The same quantized, as a block-FP8 checkpoint has it: each weight before its scale."""
        found: list[NamedTensor] = []
        for name, tensor in self.unquantized(seed):
            if name in self.layout.quantized:
                codes, scales = quantize_blockwise(tensor)
                found += [(name, codes), (f"{name}_scale_inv", scales)]
            else:
                found.append((name, tensor))
        return found


def bucket_count(named_tensors: Iterable[NamedTensor], limit: int) -> int:
    """How many requests `RefitClient.update` makes of them."""
    count = size = 0
    for name, tensor in named_tensors:
        size = aligned(size) + tensor.nbytes
        if not count or (size > limit and not name.endswith("_scale_inv")):  # with its weight
            count, size = count + 1, tensor.nbytes
    return count


def batches(limit: int) -> Iterator[int]:
    """1, 2, 4, … up to `limit`."""
    size = 1
    while size <= limit:
        yield size
        size *= 2
