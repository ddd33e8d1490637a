"""Prove what servers hold: compared with themselves, with each other, and with a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .checkpoint import safetensors_files, tensors_in
from .client import RefitClient
from .errors import ConfigError
from .trainer.fingerprint import fingerprint_of
from .wire.fingerprint import Fingerprint, Verification, compare


def verify_servers(
    urls: Sequence[str],
    checkpoint: Path | None = None,
    *,
    api_key: str | None = None,
    admin_api_key: str | None = None,
) -> list[tuple[str, str, Verification]]:
    """Compare every server with the checkpoint, or with itself if there is none, and with the first one.

    Servers that store a tensor otherwise (another tensor-parallel size may cut it otherwise) have other
    bytes by design; such names are `unproven` between them, and proven against a checkpoint.

    Args:
        checkpoint: directory of safetensors, FP32, BF16, FP16 or block-FP8.

    Returns:
        Server, what it was compared with (itself: its replicas and derived weights), and what was found.

    Raises:
        ConfigError: no such checkpoint.
        RefitError: a server that does not answer, or serves otherwise; a checkpoint of another model.
    """
    files = safetensors_files(checkpoint) if checkpoint is not None else []
    if checkpoint is not None and not files:
        raise ConfigError(
            str(checkpoint), "no safetensors", "a checkpoint is a directory of them", "Name one."
        )
    served: list[Fingerprint] = []
    expected: dict[str, Fingerprint] = {}
    comparisons = []
    for url in urls:
        client = RefitClient(url, api_key=api_key, admin_api_key=admin_api_key)
        served.append(client.fingerprint())
        if checkpoint is None:
            comparisons.append((url, "itself", compare(served[-1], served[-1])))
            continue
        plan = client.plan()
        if plan.digest not in expected:
            expected[plan.digest] = fingerprint_of(tensors_in(files), plan, source=str(checkpoint))
        found = compare(served[-1], expected[plan.digest])
        comparisons.append((url, str(checkpoint), found))
    for url, one in zip(urls[1:], served[1:], strict=True):
        comparisons.append((url, urls[0], compare(one, served[0])))
    return comparisons
