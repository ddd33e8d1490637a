"""Checkpoints on disk: their tensors, or names, shapes and dtypes without the weights.

These come from its safetensors, of which only the headers are read; where there are none, from the
`transformers` class of its config, built on `meta` and renamed as `save_pretrained` would.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from .errors import ConfigError, HostError

INDEX_NAME = "model.safetensors.index.json"


def meta_tensors(model_path: str, hf_config: Any) -> list[tuple[str, torch.Tensor]]:
    """`(name, meta tensor)` of everything the checkpoint has, or would have by its config; sorted by name. Raises
    `HostError` if there are no weights and `transformers` has no class for the config."""
    directory = checkpoint_directory(model_path)
    files = safetensors_files(directory) if directory is not None else []
    tensors = tensors_in(files) if files else _of_model_class(hf_config)
    return sorted((name, torch.empty_like(tensor, device="meta")) for name, tensor in tensors)


def safetensors_files(directory: Path) -> list[Path]:
    """The files of a checkpoint: those of its index, else all; empty if it has none."""
    index = directory / INDEX_NAME
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            found = [directory / name for name in names]
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            rule = "it has to be JSON with a weight_map"
            raise ConfigError(str(index), repr(error), rule, "Copy it again.") from error
        return found if all(path.exists() for path in found) else []
    return sorted(directory.glob("*.safetensors"))


def tensors_in(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """`(name, tensor)` as on disk, one at a time: mapped, so that values are read when they are used."""
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            opened = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:  # a link that leads nowhere, a directory
            rule = "it has to be a whole safetensors file"
            raise ConfigError(str(path), str(error), rule, "Copy it again.") from error
        with opened as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                yield name, file.get_tensor(name)


def checkpoint_directory(model_path: str) -> Path | None:
    """Where a checkpoint lies: a directory, or what is cached here of a name on the hub; None if nothing is."""
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model_path, "config.json")
    except errors.HFValidationError:  # a path that leads nowhere
        return None
    return Path(config).parent if isinstance(config, str) else None


def _of_model_class(hf_config: Any) -> Iterable[tuple[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion

    kind, autos = type(hf_config), (AutoModelForCausalLM, AutoModelForImageTextToText)
    found = next((auto._model_mapping[kind] for auto in autos if kind in auto._model_mapping), None)
    if found is None:
        rule = "names come from a checkpoint's headers or from the model class"
        remedy = "Put the checkpoint's safetensors beside its config.json."
        missing = "no weights, and no transformers class for this config"
        raise HostError(kind.__name__, missing, rule, remedy)
    with torch.device("meta"):
        model = found(hf_config)
    # Experts are fused in memory and one by one on disk; this undoes it, on meta as well.
    return revert_weight_conversion(model, model.state_dict()).items()
