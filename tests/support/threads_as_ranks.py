"""Ranks that are threads of one process: the collectives of a request without an engine."""

from __future__ import annotations

import base64
import datetime
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

PATIENCE = 60  # seconds that a rank waits for the others, one of which may be compiling


class Ranks:
    """Each rank has a gloo group object of its own, which torch's functions take as it is."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = size
        for name, function in _FUNCTIONS.items():
            monkeypatch.setattr(torch.distributed, name, function)
        store, patience = torch.distributed.HashStore(), datetime.timedelta(seconds=PATIENCE)
        gloo = torch.distributed.ProcessGroupGloo
        self.groups: list[Any] = self._run(lambda rank: gloo(store, rank, size, patience))

    def call(self, act: Callable[[int], Any]) -> list[Any]:
        """`act(rank)` on every rank at once; what each returns. Raises what one of them raised."""
        found = self._run(act)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found

    def _run(self, act: Callable[[int], Any]) -> list[Any]:
        found: dict[int, Any] = {}

        def run(rank: int) -> None:
            try:
                found[rank] = act(rank)
            except BaseException as error:  # noqa: BLE001  raised by `call`
                found[rank] = error

        threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        return [found.get(rank, TimeoutError(f"rank {rank} waits")) for rank in range(self.size)]


def _all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
    options = torch.distributed.AllreduceOptions()
    options.reduceOp = op
    group.allreduce([tensor], options).wait()


def _all_gather_object(found: list[Any], own: Any, group: Any) -> None:
    text = base64.b64encode(pickle.dumps(own))
    sent = torch.zeros(1 << 16, dtype=torch.uint8)
    sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    boxes = [[torch.zeros_like(sent) for _ in found]]
    group.allgather(boxes, [sent]).wait()
    found[:] = [
        pickle.loads(base64.b64decode(box.numpy().tobytes().rstrip(b"\0"))) for box in boxes[0]
    ]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "get_world_size": lambda group: group.size(),
    "get_rank": lambda group: group.rank(),
    "all_reduce": _all_reduce,
    "all_gather_object": _all_gather_object,
    "barrier": lambda group: group.barrier().wait(),
}
