"""Prove what servers hold: compared with themselves, with each other, and with a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .client import RefitClient
from .engine.model.checkpoint_names import safetensors_files
from .errors import ConfigError
from .trainer.fingerprint import fingerprint_of
from .wire.fingerprint import Fingerprint, Verification, compare


@dataclass(frozen=True)
class Comparison:
    """One server, and what it was compared with (itself: its replicas and derived weights)."""

    server: str
    other: str
    found: Verification

    def as_dict(self) -> dict[str, Any]:
        return {"server": self.server, "with": self.other, **self.found.as_dict()}


def verify_servers(
    urls: Sequence[str], checkpoint: Path | None = None, *, api_key: str | None = None
) -> list[Comparison]:
    """Compare every server with the checkpoint, or with itself if there is none, and with the first one.

    Servers that store a tensor otherwise (another tensor-parallel size may cut it otherwise) have other
    bytes by design; such names are `unproven` between them, and proven against a checkpoint.

    Args:
        checkpoint: directory of safetensors, FP32, BF16, FP16 or block-FP8.

    Raises:
        ConfigError: no such checkpoint.
        RefitError: a server that does not answer, or serves otherwise; a checkpoint of another model.
    """
    if checkpoint is not None and not safetensors_files(checkpoint):
        raise ConfigError(
            str(checkpoint), "no safetensors", "a checkpoint is a directory of them", "Name one."
        )
    served: list[Fingerprint] = []
    expected: dict[str, Fingerprint] = {}
    comparisons = []
    for url in urls:
        client = RefitClient(url, api_key=api_key)
        served.append(client.fingerprint())
        if checkpoint is None:
            comparisons.append(Comparison(url, "itself", compare(served[-1], served[-1])))
            continue
        plan = client.plan()
        if plan.digest not in expected:
            tensors = _tensors(checkpoint)
            expected[plan.digest] = fingerprint_of(tensors, plan, source=str(checkpoint))
        found = compare(served[-1], expected[plan.digest])
        comparisons.append(Comparison(url, str(checkpoint), found))
    for url, one in zip(urls[1:], served[1:], strict=True):
        comparisons.append(Comparison(url, urls[0], compare(one, served[0])))
    return comparisons


def _tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path in safetensors_files(checkpoint):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                yield name, file.get_tensor(name)
