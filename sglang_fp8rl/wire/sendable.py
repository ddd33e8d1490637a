"""Which tensors can be sent: full ones, with all of their elements in memory here, in a dtype that travels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ..errors import RefitError
from . import layout_text
from .gathering import PLAIN

NamedTensor = tuple[str, torch.Tensor]


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether its memory was given back, as FSDP does with parameters that it gathered: to read it ends the process."""
    is_strided = tensor.layout is torch.strided
    return is_strided and bool(tensor.numel()) and not tensor.untyped_storage().nbytes()


def sendable(named_tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Pass tensors on. Raises `RefitError` for what has no name, not all of its elements in memory here, or no dtype that
    travels."""
    for item in named_tensors:
        match item:
            case (str(name), tensor):
                del item  # it would keep the tensor
            case _:
                raise RefitError(
                    "an update",
                    f"a {type(item).__name__} where a tensor and its name belong",
                    "it takes pairs (str, torch.Tensor)",
                    "Send state_dict.items(), with each name as a str.",
                )
        if type(tensor) not in PLAIN and (
            not isinstance(tensor, torch.Tensor)
            or any(hasattr(tensor, told) for told in ("full_tensor", "local_shards"))
        ):
            raise RefitError(
                name,
                f"a {type(tensor).__name__}",
                "what is sent is a full torch.Tensor",
                "Gather DTensors with full_tensors(named_tensors), ShardedTensors (FSDP1) with a full state dict, LocalShards with assemble(name, shards).",
            )
        is_here = tensor.layout is torch.strided and not (tensor.is_meta or is_freed(tensor))
        if not is_here or tensor.dtype not in layout_text.NAMES:
            raise RefitError(
                name,
                f"{tensor.dtype}, {tensor.layout}, on {tensor.device.type}",
                f"a tensor comes with its elements in memory, in one of {', '.join(layout_text.DTYPES)}",
                "Send the weight instead of its description on meta, or before FSDP frees it; tensor.to_dense(); or another dtype.",
            )
        yield name, tensor
        del tensor  # the next one may take its place
