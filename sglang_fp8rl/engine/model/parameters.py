"""The parameters of a model as destinations of an update, and which memory the model holds beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ...errors import RefitError
from ...numerics.write_table import Widths
from ...scheme import Granularity
from ..interception.watch import kind_of, tensors_in, watched
from ..interception.writes import RecordedWrite, extent_of, storage_of
from ..modules.built import experts_may_move
from ..modules.linear import Fp8BlockwiseOnlineLinearMethod
from ..modules.moe import Fp8BlockwiseOnlineMoEMethod

OUR_METHODS = (Fp8BlockwiseOnlineLinearMethod, Fp8BlockwiseOnlineMoEMethod)
_SCALE_SUFFIXES = ("_scale_inv", "_scale")


@dataclass
class Target:
    """One parameter or buffer of the served model.

    Attributes:
        name: as in `model.named_parameters()` or `model.named_buffers()`.
        parameter: what is served; its storage never changes.
        granularity: blockwise or per channel for an FP8 weight; high precision for all else.
        scale: the FP32 scale parameter of an FP8 weight.
        module: the module that owns the parameter.
        index: its position among all targets.
    """

    name: str
    parameter: torch.Tensor
    granularity: Granularity
    module: Any
    scale: torch.nn.Parameter | None = None
    index: int = 0
    # Loader arguments and the source's shape, strides and dtype, to what the loader wrote then.
    recorded: dict[tuple, list[RecordedWrite]] = field(default_factory=dict)
    stand_ins: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    @property
    def is_repeatable(self) -> bool:
        """Whether its loader is a function of its arguments and of nothing that may change."""
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

        return not (isinstance(self.module, FusedMoE) and experts_may_move())

    @property
    def is_fp8(self) -> bool:
        return self.scale is not None

    @cached_property
    def takes_packed_scales(self) -> bool:
        """Whether its scales are served as exponents: scales that are sent have to be powers of two."""
        return self.is_fp8 and self.module.quant_method.reads_packed_scales(self.module)


def targets_of(model: torch.nn.Module) -> dict[int, Target]:
    """Every parameter and buffer of the model, by `id`. Tied parameters are one target."""
    targets: dict[int, Target] = {}
    for prefix, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        ours = isinstance(method, OUR_METHODS)
        owned = dict(module.named_parameters(recurse=False))
        owned |= {leaf: one for leaf, one in module._buffers.items() if one is not None}
        for leaf, parameter in owned.items():
            if id(parameter) in targets:
                continue
            target = Target(
                name=f"{prefix}.{leaf}" if prefix else leaf,
                parameter=parameter,
                granularity=Granularity.HIGH_PRECISION,
                module=module,
                index=len(targets),
            )
            targets[id(parameter)] = target
        if not ours or not method.fp8rl_scheme.is_fp8:
            continue
        for leaf in owned:
            for suffix in _SCALE_SUFFIXES:
                if leaf + suffix in owned:
                    weight = targets[id(owned[leaf])]
                    weight.granularity = method.fp8rl_scheme.granularity
                    weight.scale = owned[leaf + suffix]
                    break
    return targets


def widths_of(targets: Iterable[Target]) -> Widths:
    """Columns of what a refit writes, by how it is stored."""
    found: dict[Granularity, set[int]] = {one: set() for one in Granularity}
    for target in targets:
        weight = target.parameter
        if weight.dim() and weight.numel() and isinstance(weight, torch.nn.Parameter):
            found[target.granularity].add(weight.shape[-1])
    return Widths(
        frozenset(found[Granularity.HIGH_PRECISION]),
        frozenset(found[Granularity.BLOCKWISE]),
        frozenset(found[Granularity.PER_CHANNEL]),
    )


def set_loader(parameter: Any, loader: Callable[..., Any]) -> None:
    """Replace a parameter's `weight_loader`; some of SGLang's classes have it as a property."""
    if isinstance(getattr(type(parameter), "weight_loader", None), property):
        parameter._weight_loader = loader
    else:
        parameter.weight_loader = loader


def full_shape_of(target: Target, args: tuple, kwargs: dict) -> tuple[int, ...] | None:
    """The shape a sender has to send for a parameter; None where it is not known.

    SGLang's loaders `narrow` what they are given, and a tensor that is too large is cut without a
    word. `args` and `kwargs` are what the model passed to the loader: the shard id of a fused
    layer, or the name, shard id and number of an expert.
    """
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    if isinstance(target.module, FusedMoE):
        return _full_expert_shape(target, (*args, *kwargs.values()))
    return _full_linear_shape(target, args)


def _full_expert_shape(target: Target, given: tuple) -> tuple[int, ...] | None:
    """Of one expert's matrix, or of all experts together (`w13`: gate rows first).

    The parameter's own shape says neither: runners pad and transpose it.
    """
    layer, parameter = target.module, target.parameter
    leaf = target.name.rpartition(".")[2]
    is_weight = leaf in ("w13_weight", "w2_weight")
    if not is_weight or getattr(layer, "use_presharded_weights", False):
        return None
    hidden = layer.hidden_size
    intermediate = parameter.moe_intermediate_size  # type: ignore[attr-defined]  # all ranks', unpadded
    is_together = not any(type(one) is int for one in given)  # no expert's number
    experts = parameter.shape[:1] if is_together else ()
    if "w2" in given:
        return (*experts, hidden, intermediate)
    if "w13" in given:
        rows = 2 * intermediate if layer.moe_runner_config.is_gated else intermediate
        return (*experts, rows, hidden)
    return (intermediate, hidden) if "w1" in given or "w3" in given else None


def _full_linear_shape(target: Target, args: tuple) -> tuple[int, ...] | None:
    from sglang.srt.layers.linear import (
        LinearBase,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )

    layer = target.module
    leaf = target.name.rpartition(".")[2]
    if not isinstance(layer, LinearBase) or leaf not in ("weight", "bias"):
        return None
    if getattr(layer, "use_presharded_weights", False):
        return None
    if args and hasattr(layer, "fp8rl_part_rows"):  # see sent_otherwise.py
        return (layer.fp8rl_part_rows[args[0]], layer.input_size)
    if isinstance(layer, QKVParallelLinear):
        heads, kv_heads = layer.total_num_heads, layer.total_num_kv_heads
        v_head_size = getattr(layer, "v_head_size", layer.head_size)
        sizes = {
            "q": heads * layer.head_size,
            "k": kv_heads * layer.head_size,
            "v": kv_heads * v_head_size,
        }
        shard = args[0] if args else None
        rows = sizes.get(shard) if shard is not None else sum(sizes.values())
    elif isinstance(layer, MergedColumnParallelLinear):
        shard = args[0] if args else None
        if isinstance(shard, tuple):
            rows = sum(layer.output_sizes[index] for index in shard)
        else:
            rows = sum(layer.output_sizes) if shard is None else layer.output_sizes[shard]
    else:
        rows = layer.output_size
    if rows is None:
        return None
    if leaf == "bias":
        # A row-parallel bias is whole on every rank; all others are sharded like the rows.
        return (layer.output_size,) if isinstance(layer, RowParallelLinear) else (rows,)
    return (rows, layer.input_size)


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


def refusing_writes(memory: ModelMemory, is_expected: Callable[[], bool]) -> watched:
    """A context in which nothing writes into the model, unless it is expected to.

    Raises, in there:
        RefitError: something does; it is not done.
    """

    def see(func: Any, args: tuple, kwargs: dict) -> Any:
        kind = kind_of(func)
        if not is_expected():
            for tensor in tensors_in([args[at] for at in kind.written if at < len(args)]):
                place = memory.place_of(tensor)
                if place:
                    raise RefitError(
                        place,
                        f"written by {func}, past model.load_weights",
                        "a weight is quantized, recorded and proven on its way through load_weights",
                        "Use a load_format whose loader calls model.load_weights, or leave it out.",
                    )
        return func(*args, **kwargs)

    return watched(see)
