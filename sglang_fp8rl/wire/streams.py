"""The order of what is enqueued on a device, whatever stream is the current one each time."""

from __future__ import annotations

from typing import Any

import torch


class StreamTurns:
    """Has what is enqueued between two turns done in that order: an iterator may change the stream of who consumes it."""

    def __init__(self) -> None:
        self._last: dict[torch.device, Any] = {}

    def take(self, device: torch.device) -> Any:
        """What is enqueued there from now on comes behind what was before. Returns the stream; None on a CPU."""
        if device.type == "cpu":
            return None
        now = torch.get_device_module(device).current_stream(device)
        last = self._last.setdefault(device, now)
        if last != now:
            now.wait_stream(last)
            self._last[device] = now
        return now

    def wait(self) -> None:
        """All of it is done."""
        for stream in self._last.values():
            stream.synchronize()
