"""The trainer's side of `update_weights_from_distributed`: rank 0 of a gloo group."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from sglang_fp8rl.lab.testing.ports import free_port
from support.server.served import Served

GROUP = "weight_update_group"


class DistributedTrainer:
    """Joins a group with the server and broadcasts weights to it; a context manager.

    Both sides of each step block until the other takes part, so the HTTP call runs in a thread.
    """

    def __init__(self, case: Served) -> None:
        self.case = case
        self.group: Any = None

    def __enter__(self) -> DistributedTrainer:
        from sglang.srt.utils import init_custom_process_group

        port = free_port()
        body = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": GROUP,
            "backend": "gloo",
        }
        request = _Request(self.case, "/init_weights_update_group", body)
        self.group = init_custom_process_group(
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=2,
            rank=0,
            group_name=GROUP,
        )
        status, answer = request.answer()
        assert status == 200, answer
        return self

    def __exit__(self, *_: object) -> None:
        status, answer = self.case.post("/destroy_weights_update_group", {"group_name": GROUP})
        torch.distributed.destroy_process_group(self.group)
        assert status == 200, answer

    def send(
        self,
        named_tensors: Sequence[tuple[str, torch.Tensor]],
        *,
        load_format: str | None = None,
        **more: Any,
    ) -> tuple[int, Any]:
        """Announce a bucket over HTTP, with `more` fields, and broadcast it; the server's answer."""
        body = {
            "names": [name for name, _ in named_tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named_tensors],
            "shapes": [list(tensor.shape) for _, tensor in named_tensors],
            "group_name": GROUP,
            "load_format": load_format,
            **more,
        }
        request = _Request(self.case, "/update_weights_from_distributed", body)
        tensors = [tensor.contiguous() for _, tensor in named_tensors]
        if load_format == "flattened_bucket":
            tensors = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])]
        for tensor in tensors:
            torch.distributed.broadcast(tensor, src=0, group=self.group)
        return request.answer()


class _Request:
    """A POST that is under way."""

    def __init__(self, case: Served, path: str, body: dict[str, Any]) -> None:
        self._answer: list[tuple[int, Any]] = []
        self._thread = threading.Thread(
            target=lambda: self._answer.append(case.post(path, body)), daemon=True
        )
        self._thread.start()

    def answer(self) -> tuple[int, Any]:
        self._thread.join(timeout=300)
        assert self._answer, "no answer"
        return self._answer[0]
