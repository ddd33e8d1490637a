"""Small seeded checkpoints, built by the real `transformers` model classes.

The weights are a few MB and drawn so that mistakes show: every 128×128 tile has a magnitude of its
own, so a scale written to the wrong place changes the output, and so does a missing update.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ...numerics.grid import ceil_div
from .families import embedding_std, hub_config, hub_shapes, make_config

TILE = 128

_EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight"
)

# `quantization_config` of a block-FP8 checkpoint that SGLang's own `fp8` method serves.
BLOCK_FP8_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [TILE, TILE],
}


def make_state_dict(config: Any, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Seeded FP32 weights under the names a checkpoint on the hub has.

    Shapes come from the model class on the `meta` device; the values depend only on
    (`seed`, name, shape), not on the order of the names or the `transformers` version.
    """
    std = embedding_std(config)
    return {
        name: _weight(name, shape, seed, std) for name, shape in sorted(hub_shapes(config).items())
    }


def perturbed(state_dict: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A second weight set, as after a training step: each value moves by about a twentieth."""
    result = {}
    for name, weight in state_dict.items():
        noise = torch.randn(weight.shape, generator=_generator(name, seed))
        result[name] = (weight.float() * (1 + 0.05 * noise)).to(weight.dtype)
    return result


def quantized_names(state_dict: dict[str, torch.Tensor]) -> list[str]:
    """The weights a block-FP8 checkpoint on the hub quantizes: projections, not the router."""
    return [
        name
        for name, weight in state_dict.items()
        if weight.dim() == 2
        and name.endswith("weight")
        and "visual." not in name
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


def with_fused_experts(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with the experts of a layer in one tensor, as `transformers` 5 saves them.

    `experts.gate_up_proj` is `[E, 2I, H]` (gate rows first), `experts.down_proj` `[E, H, I]`.
    """
    result: dict[str, torch.Tensor] = {}
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, weight in state_dict.items():
        match = _EXPERT.fullmatch(name)
        if match:
            found.setdefault(match["experts"], {})[int(match["expert"]), match["part"]] = weight
        else:
            result[name] = weight
    for prefix, parts in found.items():
        count = 1 + max(expert for expert, _ in parts)
        result[f"{prefix}.gate_up_proj"] = torch.stack(
            [torch.cat([parts[e, "gate_proj"], parts[e, "up_proj"]]) for e in range(count)]
        )
        result[f"{prefix}.down_proj"] = torch.stack([parts[e, "down_proj"] for e in range(count)])
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
    content = hub_config(config)
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
    size = ceil_div(len(names), count)
    return (names[i * size : (i + 1) * size] for i in range(count))


def _generator(name: str, seed: int) -> torch.Generator:
    key = int.from_bytes(name.encode(), "little") % (2**31 - 1)
    return torch.Generator().manual_seed((seed + 1) * 1_000_003 + key)


def _weight(name: str, shape: tuple[int, ...], seed: int, embedding_std: float) -> torch.Tensor:
    generator = _generator(name, seed)
    noise = torch.randn(shape, generator=generator)
    if len(shape) < 2:
        return 1 + 0.1 * noise if "norm" in name else 0.1 * noise
    if "embed" in name or "lm_head" in name:
        return embedding_std * noise
    matrix = noise.reshape(-1, shape[-1]) if len(shape) == 3 else noise.reshape(shape[0], -1)
    rows, columns = (ceil_div(size, TILE) for size in matrix.shape)
    magnitude = 2.0 ** (2 * torch.rand((rows, columns), generator=generator) - 1)
    spread = magnitude.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    spread = spread[: matrix.shape[0], : matrix.shape[1]]
    fan_in = shape[1] if len(shape) == 3 else matrix.shape[1]
    return (fan_in**-0.5 * matrix * spread).reshape(shape)
