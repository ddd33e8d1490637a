"""Handles of CUDA memory, which name their GPU by UUID, as SGLang's own clients write them.

A process numbers the GPUs that it sees from 0; a trainer's actor under Ray sees one of them. SGLang's server
looks for a UUID among its own (`sglang.srt.utils.patch_torch`, which it applies before it reads).
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

DEVICE = 6  # which argument of `reductions.rebuild_cuda_tensor` is the GPU's number


class HandlePickler(ForkingPickler):
    """Pickles a CUDA tensor as a handle that any process of this machine can open that sees its GPU."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return by_uuid(reductions.reduce_tensor(value), uuid_of)
        return NotImplemented


def by_uuid(
    reduced: tuple[Callable[..., Any], tuple], uuid_of: Callable[[int], str]
) -> tuple[Callable[..., Any], tuple]:
    """What torch made of a CUDA tensor, with a UUID for the GPU's number; one that has it already stays."""
    rebuild, arguments = reduced
    number = arguments[DEVICE]
    named = uuid_of(number) if isinstance(number, int) else number
    return rebuild, (*arguments[:DEVICE], named, *arguments[DEVICE + 1 :])


def uuid_of(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)
