"""Every tensor that a model holds: parameters, buffers, and what is an attribute, also inside others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ...numerics.fingerprint import tensor_number

_NOT_HELD = frozenset({"_parameters", "_buffers", "_modules"})
_DEPTH = 3  # of containers and plain objects inside a module's attribute


class HeldTensor(NamedTuple):
    """A tensor, and what holds it: a module, or the innermost plain object of SGLang's in one."""

    place: str
    tensor: torch.Tensor
    holder: Any

    @property
    def memory(self) -> tuple[str, int]:
        """Where it lies, and under which name."""
        return self.place, self.tensor.data_ptr()

    def number(self) -> int | None:
        """Another one as soon as a bit of it changes; None of integers, which may count what happens."""
        return tensor_number(self.tensor.detach(), 0) if self.tensor.is_floating_point() else None

    @property
    def beside(self) -> set[int]:
        """The `id` of all that its holder has; of a module, also of what is in others in it."""
        if not isinstance(self.holder, torch.nn.Module):
            return set(map(id, vars(self.holder).values()))
        return {*map(id, self.holder.parameters()), *map(id, self.holder.buffers())}


def held_tensors(modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[HeldTensor]:
    """Every tensor that these modules hold by themselves; of parameters, their own."""
    for prefix, module in modules:
        start = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield HeldTensor(start + name, parameter, module)
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if name not in _NOT_HELD:
                yield from _tensors_in(value, start + name, module, _DEPTH)


def _tensors_in(value: Any, place: str, holder: Any, depth: int) -> Iterator[HeldTensor]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, torch.nn.Parameter) and value.layout is torch.strided:
            yield HeldTensor(place, value, holder)
        return
    if not depth or isinstance(value, torch.nn.Module):
        return
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    elif type(value).__module__.startswith("sglang."):
        holder, value = value, getattr(value, "__dict__", None)
    for key, part in value.items() if isinstance(value, dict) else ():
        yield from _tensors_in(part, f"{place}.{key}", holder, depth - 1)
