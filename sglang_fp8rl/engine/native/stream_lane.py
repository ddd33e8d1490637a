"""The stream that a call was made on, for loaders that run in other threads.

Models of DeepSeek's family hand their experts to a thread pool. A new thread has the default stream (and
the first device) as its own, while the scheduler works on another stream, and reads there whether what
was cast was finite: without waiting, it would read before the cast has run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class StreamLane:
    """The current stream of a device, as the thread that makes this object has it.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.current_stream(device)
        self._thread = threading.get_ident()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is queued in here goes to that stream, of that device, in any thread."""
        if threading.get_ident() == self._thread:
            yield
            return
        with self._module.stream(self._stream):
            yield
