"""Small seeded checkpoints, built by the real `transformers` model classes.

The weights are a few MB and drawn so that mistakes show: every 128×128 tile has a magnitude of its
own, so a scale written to the wrong place changes the output, and so does a missing update.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from sglang_fp8rl.errors import ConfigError

TILE = 128

# `quantization_config` of a block-FP8 checkpoint that SGLang's own `fp8` method serves.
BLOCK_FP8_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [TILE, TILE],
}

_DENSE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
}


def make_config(family: str = "qwen3", **overrides: Any) -> Any:
    """The `transformers` config of a small model of `family`."""
    from transformers import AutoConfig

    if family not in _FAMILIES:
        raise ConfigError(
            "family", repr(family), f"known: {', '.join(sorted(_FAMILIES))}", "Choose one of them."
        )
    return AutoConfig.for_model(family, **{**_DENSE, **_FAMILIES[family], **overrides})


def make_state_dict(config: Any, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Seeded FP32 weights under the names a checkpoint on the hub has.

    Shapes come from the model class on the `meta` device; the values depend only on
    (`seed`, name, shape), not on the order of the names or the `transformers` version.
    """
    return {name: _weight(name, shape, seed) for name, shape in sorted(_hub_shapes(config).items())}


def perturbed(
    state_dict: dict[str, torch.Tensor], seed: int, *, relative: float = 0.05
) -> dict[str, torch.Tensor]:
    """A second weight set, as after a training step: each value moves by about `relative`."""
    result = {}
    for name, weight in state_dict.items():
        noise = torch.randn(weight.shape, generator=_generator(name, seed))
        result[name] = (weight.float() * (1 + relative * noise)).to(weight.dtype)
    return result


def quantized_names(state_dict: dict[str, torch.Tensor]) -> list[str]:
    """The weights a block-FP8 checkpoint on the hub quantizes: projections, not the router."""
    return [
        name
        for name, weight in state_dict.items()
        if weight.dim() == 2
        and name.endswith("weight")
        and name.rsplit(".", 2)[-2] not in ("embed_tokens", "lm_head", "gate", "shared_expert_gate")
    ]


def quantized(
    state_dict: dict[str, torch.Tensor],
    cast: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """The state dict of a block-FP8 checkpoint; `cast(weight)` gives e4m3 and `weight_scale_inv`."""
    result = dict(state_dict)
    for name in quantized_names(state_dict):
        result[name], result[f"{name}_scale_inv"] = cast(state_dict[name])
    return result


def save_checkpoint(
    path: str | Path,
    config: Any,
    state_dict: dict[str, torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    shards: int = 1,
    quantization_config: dict[str, Any] | None = None,
) -> Path:
    """Write `config.json` and safetensors (with an index if `shards > 1`) as the hub has them.

    `dtype` is the dtype on disk of every tensor except e4m3 weights and their scales.
    """
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    kept = {n for n in state_dict if dtype is None or _is_quantized(n, state_dict)}
    tensors = {
        name: (w if name in kept else w.to(dtype)).contiguous() for name, w in state_dict.items()
    }
    content = {**config.to_dict(), "architectures": [_model_class(config).__name__]}
    content["dtype"] = content["torch_dtype"] = "bfloat16"
    if quantization_config is not None:
        content["quantization_config"] = quantization_config
    (path / "config.json").write_text(json.dumps(content, indent=2))
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {}
    for i, names in enumerate(_split(sorted(tensors), shards), start=1):
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n] for n in names}, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return path


def make_checkpoint(
    path: str | Path,
    family: str = "qwen3",
    *,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """A small seeded checkpoint on disk; `overrides` go to the model's config."""
    config = make_config(family, **overrides)
    return save_checkpoint(
        path, config, make_state_dict(config, seed=seed), dtype=dtype, shards=shards
    )


def _is_quantized(name: str, state_dict: dict[str, torch.Tensor]) -> bool:
    return name.endswith("_scale_inv") or f"{name}_scale_inv" in state_dict


def _split(names: list[str], count: int) -> Iterable[list[str]]:
    size = -(-len(names) // count)
    return (names[i * size : (i + 1) * size] for i in range(count))


def _model_class(config: Any) -> type:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _hub_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name → shape as stored on the hub: experts are one tensor each, not fused.

    `transformers` 5 fuses the experts in memory (`experts.gate_up_proj`, `[E, 2I, H]`).
    """
    with torch.device("meta"):
        model: Any = _model_class(config)(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if ".experts." not in name or len(shape) != 3:
            shapes[_hub_name(config, name)] = shape
            continue
        prefix, kind = name.rsplit(".", 1)
        prefix = _hub_name(config, prefix)
        mixtral = config.model_type == "mixtral"
        for expert in range(shape[0]):
            if kind == "gate_up_proj":
                for part in ("w1", "w3") if mixtral else ("gate_proj", "up_proj"):
                    shapes[f"{prefix}.{expert}.{part}.weight"] = (shape[1] // 2, shape[2])
            else:
                part = "w2" if mixtral else "down_proj"
                shapes[f"{prefix}.{expert}.{part}.weight"] = shape[1:]
    return shapes


def _hub_name(config: Any, name: str) -> str:
    """Mixtral's MoE block is `block_sparse_moe` on the hub, `mlp` in `transformers` 5."""
    return name.replace(".mlp.", ".block_sparse_moe.") if config.model_type == "mixtral" else name


def _generator(name: str, seed: int) -> torch.Generator:
    key = int.from_bytes(name.encode(), "little") % (2**31 - 1)
    return torch.Generator().manual_seed((seed + 1) * 1_000_003 + key)


def _weight(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = _generator(name, seed)
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 1 + 0.1 * noise if "norm" in name else 0.1 * noise
    if "embed_tokens" in name or "lm_head" in name:
        return 0.15 * noise
    rows, columns = (-(-size // TILE) for size in shape)
    magnitude = 2.0 ** (2 * torch.rand((rows, columns), generator=generator) - 1)
    spread = magnitude.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    return shape[1] ** -0.5 * noise * spread[: shape[0], : shape[1]]
