"""What a checkpoint of a model calls its tensors: by its `transformers` class, or by its own loader."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .called import CALLED, FUSED
from .overrides import matching


class Sent(NamedTuple):
    """One tensor of a checkpoint; `owner` is the parameter that takes it, where that is known."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: str = ""


Shapes = dict[str, Sent]

# Architectures whose checkpoints call their tensors as another's does.
_SAME_NAMES = {
    "InternS2MobiusForConditionalGeneration": "Qwen3_5MoeForConditionalGeneration",
    "KimiK3LinearForCausalLM": "KimiLinearForCausalLM",
    "MistralLarge3ForCausalLM": "DeepseekV3ForCausalLM",
}


def of_transformers(architecture: str, path: str) -> Shapes:
    """As `save_pretrained` names them; empty if `transformers` has no such class."""
    import transformers

    model_class = getattr(transformers, _SAME_NAMES.get(architecture, architecture), None)
    if model_class is None or not isinstance(model_class, type):
        return _of_text_part(path)
    config = model_class.config_class.from_pretrained(path)  # SGLang's parser changes some
    found = _saved(model_class, config)
    return called(architecture, found) if architecture in _SAME_NAMES else found


def _of_text_part(path: str) -> Shapes:
    """Of the text model in one that `transformers` does not have."""
    import transformers

    part = json.loads((Path(path) / "config.json").read_text()).get("text_config") or {}
    for one in part.get("architectures") or ():
        model_class = getattr(transformers, one, None)
        if model_class is not None:
            found = _saved(model_class, model_class.config_class(**part))
            return {f"language_model.{name}": sent for name, sent in found.items()}
    return {}


def _saved(model_class: Any, config: Any) -> Shapes:
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = model_class(config)
    state = revert_weight_conversion(model, model.state_dict())
    return {name: Sent(tuple(one.shape), _sent(one.dtype)) for name, one in sorted(state.items())}


def _sent(dtype: torch.dtype) -> torch.dtype:
    """A trainer sends what it computes with in FP32."""
    return torch.float32 if dtype.is_floating_point else dtype


def of_loader(model: Any, fused: str = "") -> Shapes:
    """The model's own names, with what its loader fuses taken apart.

    Args:
        fused: matches names that are not taken apart.
    """
    found: Shapes = {}
    modules = dict(model.named_modules())
    stacked = _stacked(model)
    for name, parameter in [*model.named_parameters(), *_stored(model)]:
        prefix, _, leaf = name.rpartition(".")
        module = modules[prefix]
        if "_scale" in leaf and hasattr(module, leaf.split("_scale")[0]):
            continue  # of an FP8 weight, which is sent unquantized
        if fused and re.match(fused, name):
            found[name] = Sent(tuple(parameter.shape), _sent(parameter.dtype), name)
            continue
        for part, shape in _parts(module, name, tuple(parameter.shape), stacked):
            found.setdefault(part, Sent(shape, _sent(parameter.dtype), name))
    return dict(sorted(found.items()))


def fused_names(architecture: str) -> str:
    """What a checkpoint of it has in one piece."""
    return next((names for one, names in FUSED.items() if re.fullmatch(one, architecture)), "")


def called(architecture: str, shapes: Shapes) -> Shapes:
    """The model's own names as checkpoints of it have them."""
    renamed = matching(CALLED, architecture)
    found: dict[str, list[Sent]] = {}
    for name, one in shapes.items():
        for pattern, replacement in renamed.items():
            is_there = replacement is not None or not re.fullmatch(pattern, name)
            name = re.sub(pattern, replacement or "", name) if is_there else ""
        if name:
            found.setdefault(name, []).append(one)
    return {name: _stacked_up(parts) for name, parts in found.items()}


def _stacked_up(parts: list[Sent]) -> Sent:
    first = parts[0]
    return first if len(parts) == 1 else first._replace(shape=(len(parts), *first.shape))


def _stored(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for leaf, one in module._buffers.items():
            if one is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{prefix}.{leaf}" if prefix else leaf, one


def _parts(
    module: Any, name: str, shape: tuple[int, ...], stacked: dict[str, dict[Any, str]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    prefix, _, leaf = name.rpartition(".")
    if isinstance(module, VocabParallelEmbedding):  # padded
        shape = (module.org_vocab_size, *shape[1:])
    if isinstance(module, FusedMoE):
        yield from _expert_parts(module, prefix, leaf, shape, stacked)
        return
    sizes: dict[Any, int] = {}
    if isinstance(module, QKVParallelLinear):
        value = getattr(module, "v_head_size", module.head_size)
        sizes = {
            "q": module.total_num_heads * module.head_size,
            "k": module.total_num_kv_heads * module.head_size,
            "v": module.total_num_kv_heads * value,
        }
    elif isinstance(module, MergedColumnParallelLinear):
        sizes = dict(enumerate(module.output_sizes))
    fused = prefix.rpartition(".")[2]
    parts = stacked.get(fused, {})
    if not sizes or not set(sizes) <= set(parts):
        yield name, shape
        return
    base = prefix.removesuffix(fused)
    for shard, rows in sizes.items():
        yield f"{base}{parts[shard]}.{leaf}", (rows, *shape[1:])


def _expert_parts(
    module: Any, prefix: str, leaf: str, shape: tuple[int, ...], stacked: dict[str, dict[Any, str]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    names = stacked.get("experts") or {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    hidden, inner = module.hidden_size, module.intermediate_size_per_partition
    sizes = {
        "w13_weight": {"w1": (inner, hidden), "w3": (inner, hidden)},
        "w2_weight": {"w2": (hidden, inner)},
    }
    for expert in range(module.num_experts):
        for shard, size in sizes.get(leaf, {}).items():
            yield f"{prefix}.{expert}.{names[shard]}.weight", size


def _stacked(model: Any) -> dict[str, dict[Any, str]]:
    """Fused name to the names of its parts by shard, as constants in the sources of its loaders."""
    found: dict[str, dict[Any, str]] = {}
    sources = dict.fromkeys(
        base.__module__
        for module in model.modules()
        if hasattr(module, "load_weights")
        for base in type(module).__mro__
    )
    for source in reversed(sources):  # the model's own last: it wins
        if source.startswith("sglang."):
            for fused, shard, part in _mappings(source):
                found.setdefault(fused, {})[shard] = part
    return found


@functools.cache
def _mappings(module: str) -> list[tuple[str, Any, str]]:
    found: list[tuple[str, Any, str]] = []
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple) and len(node.elts) == 3:
            values = [one.value if isinstance(one, ast.Constant) else None for one in node.elts]
            fused, part, shard = values
            if isinstance(fused, str) and isinstance(part, str) and isinstance(shard, (str, int)):
                found.append((fused.strip("."), shard, part.strip(".")))
        is_part = isinstance(node, ast.keyword) and node.arg in _EXPERT_KEYWORDS
        if is_part and isinstance(node.value, ast.Constant):
            found.append(("experts", _EXPERT_KEYWORDS[node.arg], node.value.value))
    return found


_EXPERT_KEYWORDS = {
    "ckpt_gate_proj_name": "w1",
    "ckpt_down_proj_name": "w2",
    "ckpt_up_proj_name": "w3",
}
