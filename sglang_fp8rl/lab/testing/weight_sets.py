"""The two weight sets of the demo: a checkpoint, and the same after a step of training, made by a perturbation
that depends on a tensor's name and a seed only. Neither is ever held whole.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...checkpoint import safetensors_files, tensors_in
from ...errors import ConfigError
from .checkpoints import perturbed, save_tensors

UPDATE_SEED = 1


@dataclass(frozen=True)
class Checkpoint:
    """A directory with `config.json` and safetensors."""

    path: Path

    @property
    def files(self) -> list[Path]:
        return safetensors_files(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """Of its model. Raises `ConfigError` if it can't be read."""
        path = self.path / "config.json"
        try:
            return dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            rule = "it has to be a JSON object"
            raise ConfigError(
                str(path), str(error), rule, "Name a checkpoint's directory."
            ) from error

    @property
    def vocab_size(self) -> int:
        return int(self.config.get("vocab_size") or self.config["text_config"]["vocab_size"])

    def check(self) -> Checkpoint:
        """Itself. Raises `ConfigError` for what has no weights that can be moved."""
        if not (self.path / "config.json").is_file() or not self.files:
            rule = "a directory with config.json and *.safetensors is needed"
            remedy = "Download the model first, and give its directory."
            raise ConfigError("--model", str(self.path), rule, remedy)
        method = (self.config.get("quantization_config") or {}).get("quant_method")
        if method:
            raise quantized_already("--model", f"quant_method {method!r}")
        _ = self.nbytes  # every file can be opened
        return self

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return tensors_in(self.files)

    @functools.cached_property
    def nbytes(self) -> int:
        """Of all tensors, as FP32; reads no values."""
        return 4 * sum(tensor.numel() for _, tensor in self.tensors())


def quantized_already(subject: str, found: str) -> ConfigError:
    rule = "only an unquantized checkpoint is quantized"
    return ConfigError(subject, found, rule, "Start from the BF16 or FP32 one.")


def masters(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint as a trainer sends it: FP32."""
    for name, tensor in checkpoint.tensors():
        yield name, tensor.float() if tensor.is_floating_point() else tensor


def updated(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """The second set, in FP32."""
    for name, tensor in checkpoint.tensors():
        yield name, _moved(name, tensor)


def write_updated(
    checkpoint: Checkpoint, path: Path, on_bytes: Callable[[int], None]
) -> Checkpoint:
    """Write the second set as a checkpoint of its own, file by file.

    In FP32, but for matrices that are BF16 in the first: there the fresh server reads BF16 where
    the other was sent FP32. The cast goes through BF16, so both have to serve the same bytes.

    Args:
        on_bytes: called behind each file with the bytes done so far, as FP32.

    Raises:
        ConfigError: not enough room on the disk.
    """
    path.mkdir(parents=True)
    free = shutil.disk_usage(path).free
    if free < checkpoint.nbytes:
        raise ConfigError(
            str(path),
            f"{free / 1e9:.1f} GB free",
            f"the updated checkpoint takes up to {checkpoint.nbytes / 1e9:.1f} GB",
            "Set TMPDIR to a larger disk.",
        )
    for file in checkpoint.path.iterdir():
        if file.is_file() and file.suffix in (".json", ".txt", ".model", ".py"):
            shutil.copy(file, path / file.name)
    done = 0
    for file in checkpoint.files:
        tensors = {}
        for name, tensor in tensors_in([file]):
            is_bf16_matrix = tensor.dtype == torch.bfloat16 and tensor.dim() > 1
            moved = _moved(name, tensor)
            tensors[name] = moved.bfloat16() if is_bf16_matrix else moved
            done += 4 * tensor.numel()
        save_tensors(tensors, path / file.name)
        on_bytes(done)
    return Checkpoint(path)


def _moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return perturbed({name: tensor.float()}, UPDATE_SEED)[name]
