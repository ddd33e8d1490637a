"""Checkpoints that `export_checkpoint` made, once a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_fp8rl.lab.export import export_checkpoint
from support.engine.models import MODELS, checkpoint


def exported(checkpoint_dir: Path, name: str, **options: Any) -> Path:
    """The directory of a model's first weights, exported."""
    out = checkpoint_dir / f"{name}-exported"
    if not out.exists():
        export_checkpoint(str(checkpoint(checkpoint_dir, MODELS[name], "first")), out, **options)
    return out
