"""The trainer's log-probabilities: transformers, in BF16 as RL trainers run it, and in FP32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from small_dapo.wide_products import wide_products

from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.lab.eval.gap import Precision, load_model, rescore
from sglang_fp8rl.lab.eval.server import Rollout

from .serving import Advance

_OVERHEAD = 3 << 30  # bytes: SGLang, torch, activations and logits of both processes


def check_memory(folder: Path, copies: float, available: int | None = None) -> None:
    """Refuse, before anything starts, a model that will not fit.

    Args:
        copies: how many FP32 copies of it are held at once, by all processes together.
        available: bytes; by default what the machine says.

    Raises:
        ConfigError: it does not fit.
    """
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    needed = int(size * copies) + _OVERHEAD
    free = psutil.virtual_memory().available if available is None else available
    if needed > free:
        raise ConfigError(
            str(folder),
            f"{needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} free",
            f"{copies:g} copies of the model in FP32 and {_OVERHEAD / 2**30:.0f} GiB are held at once",
            "Free memory, or take a smaller model.",
        )


class TrainerSide:
    """A transformers model that scores; loaded at its first use.

    Args:
        folder: the converted checkpoint.
        precision: of its weights and activations; log-softmax is in FP32 either way.
    """

    def __init__(self, folder: Path, precision: Precision) -> None:
        self._folder, self._precision = folder, precision
        self._model: Any = None

    def score(
        self, sequences: Sequence[tuple[list[int], list[int]]], advance: Advance
    ) -> list[torch.Tensor]:
        """FP32 log-probabilities of each continuation behind its prefix."""
        if self._model is None:
            self._model = load_model(str(self._folder), self._precision, "cpu")
        scored = []
        for prefix, rest in sequences:
            with wide_products():
                scored += rescore(self._model, [Rollout(prefix, rest, [])])
            advance(len(rest))
        return scored
