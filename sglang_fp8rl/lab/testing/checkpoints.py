"""Small seeded checkpoints, built by the real `transformers` model classes.

The weights are a few MB and drawn so that mistakes show: every 128×128 tile has a magnitude of its
own, so a scale written to the wrong place changes the output, and so does a missing update.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...checkpoint import INDEX_NAME
from ...errors import ConfigError
from ...formats.format import ceil_div
from .families import embedding_std, hub_config, hub_shapes, make_config

TILE = 128


def make_state_dict(config: Any, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Seeded FP32 weights under the names a checkpoint on the hub has; the values depend only on (`seed`, name,
    shape), not on the order of the names or the `transformers` version."""
    std, shapes = embedding_std(config), sorted(hub_shapes(config).items())
    return {name: _weight(name, shape, seed, std) for name, shape in shapes}


def perturbed(state_dict: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A second weight set, as after a training step: each value moves by about a twentieth."""
    result = {}
    for name, weight in state_dict.items():
        noise = torch.randn(weight.shape, generator=_generator(name, seed))
        result[name] = (weight.float() * (1 + 0.05 * noise)).to(weight.dtype)
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
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in state_dict.items():
        is_quantized = tensor.dtype == torch.float8_e4m3fn or name.endswith("_scale_inv")
        wanted = tensor.dtype if dtype is None or is_quantized else dtype
        tensors[name] = tensor.to(wanted).contiguous()
    content = hub_config(config)
    if quantization_config is not None:
        content["quantization_config"] = quantization_config
    (path / "config.json").write_text(json.dumps(content, indent=2))
    if shards == 1:
        save_tensors(tensors, path / "model.safetensors")
        return path
    weight_map: dict[str, str] = {}
    for i, names in enumerate(np.array_split(sorted(tensors), shards), start=1):
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names.tolist()}
        save_tensors(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / INDEX_NAME).write_text(json.dumps(index, indent=2))
    return path


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file of a checkpoint. Raises `ConfigError` where it can't be written whole."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # of a full disk too
        rule, remedy = "it has to be written whole", "Make room, or choose another place."
        raise ConfigError(str(path), str(error), rule, remedy) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors leaves it to its owner alone


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
    weights = make_state_dict(config, seed=seed)
    return save_checkpoint(path, config, weights, dtype=dtype, shards=shards)


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
