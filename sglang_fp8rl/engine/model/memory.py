"""Which memory the model holds: its parameters and buffers, and every other tensor that its modules keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..interception.writes import extent_of
from .parameters import Target

_DEPTH = 3  # of containers and plain objects inside a module's attribute


class ModelMemory:
    """Whose memory a tensor lies in; of the tensors that the model holds when this is made.

    Args:
        targets: parameters and buffers, which an update may write.
    """

    def __init__(self, model: torch.nn.Module, targets: Iterable[Target]) -> None:
        self._targets: dict[int, list[Target]] = {}
        self._quantized: set[int] = set()
        for target in targets:
            self._targets.setdefault(storage_of(target.parameter), []).append(target)
            if target.scale is not None:
                self._quantized |= {storage_of(target.parameter), storage_of(target.scale)}
        self._others = {storage_of(one): place for place, one in held_tensors(model)}

    def place_of(self, tensor: torch.Tensor) -> str:
        """The name of a parameter, buffer or attribute in whose storage `tensor` lies; empty if in none."""
        storage = storage_of(tensor)
        owners = self._targets.get(storage)
        return owners[0].name if owners else self._others.get(storage, "")

    def is_quantized(self, tensor: torch.Tensor) -> bool:
        """Whether FP8 codes or their scales lie in the same storage."""
        return storage_of(tensor) in self._quantized

    def target_of(self, view: torch.Tensor) -> Target | None:
        """The parameter or buffer that `view` is all or a part of, with that dtype."""
        for target in self._targets.get(storage_of(view), ()):
            whole = target.parameter
            first, last = extent_of(whole)
            start, end = extent_of(view)
            if first <= start and end <= last and whole.dtype == view.dtype:
                return target
        return None


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the storage of a tensor, also on `meta`; no two that live have the same."""
    return tensor.untyped_storage()._cdata


def held_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a module holds, and where: buffers and attributes, also in containers.

    Parameters are not among them.
    """
    for prefix, module in model.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if name not in _NOT_HELD:
                yield from _tensors_in(value, f"{prefix}.{name}" if prefix else name, _DEPTH)


_NOT_HELD = frozenset({"_parameters", "_buffers", "_modules"})


def _tensors_in(value: Any, place: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, torch.nn.Parameter) and value.layout is torch.strided:
            yield place, value
        return
    if not depth or isinstance(value, torch.nn.Module):
        return
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    elif type(value).__module__.startswith("sglang."):
        value = getattr(value, "__dict__", None)
    for key, part in value.items() if isinstance(value, dict) else ():
        yield from _tensors_in(part, f"{place}.{key}", depth - 1)
