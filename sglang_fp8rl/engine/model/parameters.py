"""The parameters of a model as destinations of an update, and which memory the model holds beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ...errors import RefitError
from ...formats import BlockGrid, Format
from ...numerics.fingerprint import tensor_number
from ..interception import Region, extent_of, make_stand_in, storage_of
from ..modules.built import experts_may_move
from ..modules.method import format_of


@dataclass
class Target:
    """One parameter or buffer of the served model.

    Attributes:
        parameter: its storage never changes.
        module: that owns the parameter.
        scale, format: of an FP8 weight, the parameter of its scales, and how it is held.
        index: among all targets.
    """

    name: str
    parameter: torch.Tensor
    module: Any
    scale: torch.nn.Parameter | None = None
    format: Format | None = None
    index: int = 0
    _stand_ins: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def stand_in(self, dtype: torch.dtype) -> torch.Tensor:
        """What a loader is given in the place of the parameter, for tensors of that dtype."""
        if dtype not in self._stand_ins:
            self._stand_ins[dtype] = make_stand_in(self.parameter, dtype)
        return self._stand_ins[dtype]

    @property
    def is_repeatable(self) -> bool:
        """Whether its loader is a function of its arguments and of nothing that may change."""
        return not (self.has_experts and experts_may_move())

    @cached_property
    def has_experts(self) -> bool:
        """Whether it is of SGLang's layer of experts."""
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

        return isinstance(self.module, FusedMoE)

    @property
    def is_fp8(self) -> bool:
        return self.scale is not None

    @property
    def is_fused(self) -> bool:
        """Whether it is a weight that several tensors may fill to its last element."""
        from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

        kinds = (MergedColumnParallelLinear, QKVParallelLinear)
        return isinstance(self.module, kinds) and self.name.endswith(".weight")

    @property
    def layout(self) -> tuple:
        """Where and how it lies in memory, and its scales."""
        held = (self.parameter,) if self.scale is None else (self.parameter, self.scale)
        return tuple([(one.data_ptr(), one.dtype, one.shape, one.stride()) for one in held])

    def scales_of(self, name: str, region: Region) -> tuple[torch.Tensor, ...]:
        """The scales of each matrix of a region of an FP8 weight, where the tensor `name` is written.

        Raises:
            RefitError: the region does not consist of whole blocks.
        """
        assert self.scale is not None
        scales = self.scale.data
        part: tuple[slice, ...] = self._grid.scales_of(
            region.start[-2:],
            region.shape[-2:],
            name=name,
            value=f"a write to {region} of {self.name}",
            error=RefitError,
            remedy=f"Add the module of {self.name} to ignored_layers, or use another tensor-parallel size.",
        )
        if scales.dim() == 3:  # one matrix per expert
            part = slice(region.start[0], region.start[0] + region.shape[0]), *part
        return matrices(scales[part])

    @cached_property
    def _grid(self) -> BlockGrid:
        assert self.format is not None
        return self.format.grid(self.parameter.shape)

    @cached_property
    def takes_packed_scales(self) -> bool:
        """Whether its scales are served as exponents: scales that are sent have to be powers of two."""
        return self.is_fp8 and self.module.quant_method.reads_packed_scales(self.module)


def matrices(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A matrix, or each expert's."""
    return tensor.unbind(0) if tensor.dim() == 3 else (tensor,)


def part_of(args: tuple, kwargs: dict) -> tuple:
    """Which part of a parameter a loader call is for; the same for a weight and its scale, which has its name."""
    return (*args, *(value for _, value in sorted(kwargs.items())))


def made_anew_error(place: str) -> RefitError:
    """Return the error for FP8 codes in whose place the model put another tensor."""
    return RefitError(
        place,
        "made anew while SGLang loads it",
        "what is served in FP8 is written by copies, which are cast with their scales",
        "Add the module to ignored_layers.",
    )


def targets_of(model: torch.nn.Module) -> dict[int, Target]:
    """Every parameter and buffer of the model, by `id`. Tied parameters are one target."""
    targets: dict[int, Target] = {}
    for prefix, module in model.named_modules():
        held = format_of(module)
        owned = dict(module.named_parameters(recurse=False))
        owned |= {leaf: one for leaf, one in module._buffers.items() if one is not None}
        for leaf, parameter in owned.items():
            target = targets.get(id(parameter))
            if target is None:
                name = f"{prefix}.{leaf}" if prefix else leaf
                target = targets[id(parameter)] = Target(
                    name, parameter, module, index=len(targets)
                )
            scale = owned.get(held.scale_name(leaf)) if held is not None else None
            if scale is not None:  # whichever module held it first, this one serves it
                target.module, target.scale, target.format = module, scale, held
    return targets


def loader_of(parameter: Any) -> Callable[..., Any]:
    """SGLang's loader of a parameter or buffer.

    The default one fills what has one element with a value that Python reads; here that is a copy, as of all others.
    """
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    loader = getattr(parameter, "weight_loader", None) or default_weight_loader
    return _copy_one if loader is default_weight_loader and parameter.numel() == 1 else loader


def _copy_one(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded.reshape(parameter.shape))


def set_loader(parameter: Any, loader: Callable[..., Any]) -> None:
    """Replace a parameter's `weight_loader`; some of SGLang's classes have it as a property."""
    if isinstance(getattr(type(parameter), "weight_loader", None), property):
        parameter._weight_loader = loader
    else:
        parameter.weight_loader = loader


class ModelMemory:
    """Whose memory a tensor lies in; of the tensors that the model holds when this is made."""

    def __init__(self, model: torch.nn.Module, targets: Iterable[Target]) -> None:
        self._targets: dict[int, list[Target]] = {}
        self._quantized: set[int] = set()
        for target in targets:
            self._targets.setdefault(storage_of(target.parameter), []).append(target)
            if target.scale is not None:
                self._quantized |= {storage_of(target.parameter), storage_of(target.scale)}
        held = held_tensors(model.named_modules())
        self._others = {storage_of(one.tensor): one.place for one in held}

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


_NOT_HELD = frozenset(vars(torch.nn.Module()))  # torch's own: modules, hooks, and tensors by kind
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
    """Every tensor that these modules hold by themselves; of parameters, their own and what was kept on them."""
    for prefix, module in modules:
        start = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield HeldTensor(start + name, parameter, module)
                yield from _tensors_in(vars(parameter), start + name, module, _DEPTH)
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if name not in _NOT_HELD and _is_walked(value.__class__):
                yield from _tensors_in(value, start + name, module, _DEPTH)


def _tensors_in(value: Any, place: str, holder: Any, depth: int) -> Iterator[HeldTensor]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, torch.nn.Parameter) and value.layout is torch.strided:
            yield HeldTensor(place, value, holder)
        return
    if not depth:
        return
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    elif type(value).__module__.startswith("sglang."):
        holder, value = value, getattr(value, "__dict__", None)
    for key, part in value.items() if isinstance(value, dict) else ():
        if _is_walked(part.__class__):
            yield from _tensors_in(part, f"{place}.{key}", holder, depth - 1)


@functools.cache  # a model's modules have ten thousands of attributes, most of them numbers and names
def _is_walked(kind: Any) -> bool:
    """Whether values of that type are tensors, or are looked into."""
    is_looked_into = issubclass(kind, (list, tuple, dict)) or kind.__module__.startswith("sglang.")
    return issubclass(kind, torch.Tensor) or (
        is_looked_into and not issubclass(kind, torch.nn.Module)
    )
