"""The parameters of a model as destinations of an update: what each is, and who else it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ...numerics.write_table import Widths
from ...scheme import Granularity
from ..interception.writes import RecordedWrite
from ..modules.layouts import experts_may_move
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
    if args and hasattr(layer, "fp8rl_part_rows"):  # see mla_parts.py
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
