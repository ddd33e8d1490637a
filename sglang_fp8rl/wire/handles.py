"""Handles of shared memory, as SGLang's own `MultiprocessingSerializer` reads them: a `ForkingPickler` stream in base64.

It holds handles, not the weights; server and client therefore run on one machine.
"""

from __future__ import annotations

import base64
import io
import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

DEVICE = 6  # which argument of `reductions.rebuild_cuda_tensor` is the GPU's number
_STRATEGY = threading.Lock()  # torch's sharing strategy is the whole process's


class HandlePickler(ForkingPickler):
    """Pickles a CUDA tensor as a handle that any process of this machine can open that sees its GPU.

    Each process numbers the GPUs that it sees from 0, so a handle names its GPU by UUID, as SGLang's own clients
    write it; one that SGLang's patch of torch has made so already stays.
    """

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        named = arguments[DEVICE]
        if isinstance(named, int):
            named = str(torch.cuda.get_device_properties(named).uuid)
        return rebuild, (*arguments[:DEVICE], named, *arguments[DEVICE + 1 :])


def serialize(value: Any) -> str:
    """`value` as `MultiprocessingSerializer.serialize(..., output_str=True)` would, for a server
    that did not start this process."""
    stream = io.BytesIO()
    with _STRATEGY:
        before = torch.multiprocessing.get_sharing_strategy()
        # torch's default (file descriptors) is refused between processes that did not start each other:
        # `AuthenticationError: digest sent was rejected`.
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            HandlePickler(stream).dump(value)
        finally:
            torch.multiprocessing.set_sharing_strategy(before)
    return base64.b64encode(stream.getvalue()).decode("ascii")
