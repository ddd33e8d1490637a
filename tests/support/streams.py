"""Streams of a CPU that are a thread's own, as a GPU's are: each has a current one, the default one at first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class Streams(threading.local):
    current = "default"


def use_streams(patched: pytest.MonkeyPatch) -> Streams:
    """`torch.cpu.stream(name)` and `torch.cpu.current_stream()` go by these."""
    streams = Streams()

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        before, streams.current = streams.current, name
        try:
            yield
        finally:
            streams.current = before

    patched.setattr(torch.cpu, "current_stream", lambda device=None: streams.current)
    patched.setattr(torch.cpu, "stream", stream)
    return streams
