"""What SGLang's own loaders do not take in every way that it may come: parts of a fused weight, fused experts.

MLA models read `q_a_proj` and `kv_a_proj_with_mqa` into one weight. SGLang keeps the first of them
in a local variable of `load_weights` until the second comes, and forgets it at the end of the call (a bucket may
end anywhere); an FP8 weight and its scale, which go by under one name, would overwrite each other there. So each
part has a loader of its own here: its rows of the fused weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...errors import ConfigError
from ...wire.sent_names import FUSED_PARTS, matrices_of
from ..arrival.sent_tensors import Source
from ..modules.method import format_of
from .parameters import set_loader

_FUSED = "fused_qkv_a_proj_with_mqa"
_FIRST, _SECOND = "q_a_proj", "kv_a_proj_with_mqa"

LoadWeights = Callable[..., Any]


def refuse_loaders_that_ask(model: torch.nn.Module) -> None:
    """Raises `ConfigError` for loaders that turn a tensor only if they are given the module's own parameter.

    Here it is a stand-in. SGLang's Inkling orders the rows of gate and up for LoRA's kernels so.
    """
    for name, module in model.named_modules():
        if getattr(module, "_w13_gate_up_contiguous", False):
            raise ConfigError(
                name,
                "rows of gate and up in the order of LoRA's kernels",
                "its loader orders them only if it is given the parameter itself, and is given a stand-in",
                "Serve it without LoRA, or with another --lora-backend than triton_v2.",
            )


def load_parts_singly(model: torch.nn.Module) -> LoadWeights:
    """The model's `load_weights`, which from now on takes every part in whatever call it comes.

    Side effects on the host: the fused parameters' `weight_loader` takes a part's name as its third
    argument, and their modules have `fp8rl_part_rows`, the rows of each part.

    Raises:
        ConfigError: a block of the fused weight would reach over two parts.
    """
    native: LoadWeights = model.load_weights  # type: ignore[assignment]
    fused_of: dict[str, Any] = {}  # name of a part: the parameter that it fills some rows of
    for prefix, attention in model.named_modules():
        weight = getattr(getattr(attention, _FUSED, None), "weight", None)
        if weight is not None:
            _take_parts(f"{prefix}.{_FUSED}", getattr(attention, _FUSED), attention.q_lora_rank)
            fused_of |= {f"{prefix}.{part}.weight": weight for part in (_FIRST, _SECOND)}
    if not fused_of:
        return native

    def others(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            parameter = fused_of.get(name)
            if parameter is None:
                yield name, tensor
            else:
                parameter.weight_loader(parameter, tensor, name.split(".")[-2])

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kw: Any) -> Any:
        return native(others(weights), *args, **kw)

    return load_weights


def _take_parts(name: str, fused: Any, first_rows: Any) -> None:
    """Give a fused module's weight a loader that knows where each part lies."""
    held = format_of(fused)
    block_n = held.grid(fused.weight.shape).block[0] if held is not None else 1
    if first_rows % block_n:
        raise ConfigError(
            name,
            f"q_lora_rank {first_rows}",
            f"its parts {_FIRST} and {_SECOND} are cut at a multiple of block_n {block_n}, or one "
            "block would belong to both",
            "Add the module to ignored_layers.",
        )
    weight, native = fused.weight, fused.weight.weight_loader
    fused.fp8rl_part_rows = rows = {_FIRST: first_rows, _SECOND: weight.shape[0] - first_rows}

    def weight_loader(parameter: Any, loaded: torch.Tensor, part: str | None = None) -> None:
        if part is None:
            native(parameter, loaded)
        else:
            start = 0 if part == _FIRST else first_rows
            parameter.data.narrow(0, start, rows[part]).copy_(loaded)

    set_loader(weight, weight_loader)


def load_left_experts(
    model: torch.nn.Module, left: Iterable[Source], load_weights: LoadWeights
) -> None:
    """Load the fused experts among `left`, the tensors that no loader was called for.

    `transformers` 5 holds experts as one tensor: `gate_up_proj` (`[E, 2I, H]`, gate rows first) or `down_proj`
    (`[E, H, I]`) behind the name of a `FusedMoE` module. Some of SGLang's models read these themselves, in a
    layout of their own. For the others, what they left is handed to them once more, expert by expert, under the
    names they know. The shapes are checked with each expert.
    """
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    sent = {one.name: one.tensor for one in left if one.tensor is not None and len(one.shape) == 3}
    if not sent:
        return
    parts = [
        matrix
        for prefix, module in model.named_modules()
        if isinstance(module, FusedMoE)
        for leaf in FUSED_PARTS
        if f"{prefix}.{leaf}" in sent
        for matrix in matrices_of(prefix, leaf, sent[f"{prefix}.{leaf}"])
    ]
    if parts:
        load_weights(parts)
