"""What is done with a class at one rank instead of judging it: leave checkpoints of it, or the names of one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .host import Builder
from .judge import LAST, Judge
from .names import Sent, Shapes
from .naming import weights
from .outcome import NO_EXPERTS, Row
from .preload import Judged


class Saver(Judge):
    """Leaves checkpoints of three weight sets, for a server: `directory/0`, `1`, `2`; every tensor differs."""

    def __init__(self, architecture: str, answer: Callable[[Row], None], directory: Path) -> None:
        super().__init__(architecture, answer)
        self._directory = directory

    def load(self, model_config: Any, load_config: Any) -> Any:
        from safetensors.torch import save_file

        builder = Builder(model_config, load_config)
        if self.loads(builder):
            shapes = self._loaded.shapes
            self.row.names = len(shapes)
            for seed in range(LAST + 1):
                path = self._directory / str(seed)
                path.mkdir(parents=True)
                shutil.copy(Path(builder.path) / "config.json", path)
                save_file(weights(shapes, seed), path / "model.safetensors")
        self._answer(self.row)
        raise Judged


class Namer(Judge):
    """Leaves what a trainer sends of it, for ranks that hold a part of it each.

    Args:
        path: gets it, as JSON; nothing if no small model of the class is loaded.
        needs_experts: a model without experts is left out.
    """

    def __init__(
        self,
        architecture: str,
        answer: Callable[[Row], None],
        path: Path,
        *,
        needs_experts: bool = False,
    ) -> None:
        super().__init__(architecture, answer)
        self._path, self._needs_experts = path, needs_experts

    def load(self, model_config: Any, load_config: Any) -> Any:
        is_loaded = self.loads(Builder(model_config, load_config))
        names = self._loaded.shapes if is_loaded else self._names
        if self._needs_experts and self._plain is not None and not _has_experts(self._plain):
            self.row.kind, self.row.reasons = "not built", [NO_EXPERTS]
        elif names:
            self._path.write_text(json.dumps(_written(names)))
        self._answer(self.row)
        raise Judged


def _has_experts(model: Any) -> bool:
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    return any(isinstance(module, FusedMoE) for module in model.modules())


def _written(names: Shapes) -> dict[str, Any]:
    return {
        name: (one.shape, str(one.dtype).removeprefix("torch."), one.owner)
        for name, one in names.items()
    }


def read_names(path: Path) -> Shapes:
    """What a `Namer` left."""
    found = json.loads(path.read_text())
    return {
        name: Sent(tuple(shape), getattr(torch, dtype), owner)
        for name, (shape, dtype, owner) in found.items()
    }
