"""Checkpoints on disk: their tensors, or names, shapes and dtypes without the weights.

These come from the headers of its safetensors; where there are none, from the `transformers` class of its
config, built on `meta` and renamed as `save_pretrained` would.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from .errors import HostError

INDEX_NAME = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def meta_tensors(model_path: str, hf_config: Any) -> list[tuple[str, torch.Tensor]]:
    """`(name, meta tensor)` of everything the checkpoint has, or would have; sorted by name.

    Args:
        model_path: a directory, or a name on the hub (only what is cached here is looked at).
        hf_config: of the model, for a checkpoint without weights.

    Raises:
        HostError: there are no weights and `transformers` has no class for the config.
    """
    directory = checkpoint_directory(model_path)
    files = safetensors_files(directory) if directory is not None else []
    if not files:
        return sorted(_of_model_class(hf_config))
    return sorted(
        (name, torch.empty(shape, dtype=dtype, device="meta"))
        for path in files
        for name, shape, dtype in headers(path)
    )


def safetensors_files(directory: Path) -> list[Path]:
    """The files of a checkpoint: those of its index, else all; empty if it has none."""
    index = directory / INDEX_NAME
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        found = [directory / name for name in names]
        return found if all(path.exists() for path in found) else []
    return sorted(directory.glob("*.safetensors"))


def headers(path: Path) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """`(name, shape, dtype)` of each tensor of a file; reads its header only."""
    for file, name in _entries(path):
        part = file.get_slice(name)
        yield name, tuple(part.get_shape()), _DTYPES[part.get_dtype()]


def tensors_in(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """`(name, tensor)` as on disk, one at a time."""
    for path in files:
        for file, name in _entries(path):
            yield name, file.get_tensor(name)


def _entries(path: Path) -> Iterator[tuple[Any, str]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  not a mapping
            yield file, name


def checkpoint_directory(model_path: str) -> Path | None:
    """Where a checkpoint lies: a directory, or what is cached of a name; None if nothing is."""
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import try_to_load_from_cache

    for name in (INDEX_NAME, "model.safetensors", "config.json"):
        found = try_to_load_from_cache(model_path, name)
        if isinstance(found, str):
            return Path(found).parent
    return None


def _of_model_class(hf_config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion

    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(hf_config) in auto._model_mapping:
            break
    else:
        raise HostError(
            type(hf_config).__name__,
            "no weights, and no transformers class for this config",
            "names come from a checkpoint's headers or from the model class",
            "Put the checkpoint's safetensors beside its config.json.",
        )
    with torch.device("meta"):
        model = auto._model_mapping[type(hf_config)](hf_config)
    # Experts are fused in memory and one by one on disk; this undoes it, on meta as well.
    yield from revert_weight_conversion(model, model.state_dict()).items()
