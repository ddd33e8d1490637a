"""The plan of a built model, as the document that trainers read (`plan_schema.json`).

Everything in it is read off the modules and what their loaders did with each name (`landings.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...config import Options
from ...formats import Format
from ...scheme import HIGH_PRECISION, Scheme, module_rows
from ...wire.plan import FP8, PLAN_FORMAT, PLAN_VERSION, UNUSED, digest_of
from ..model.landings import Known, Landing, NameTable, left_out
from ..model.parameters import Target


def plan_document(
    model: Any,
    names: NameTable,
    targets: Mapping[int, Target],
    schemes: Mapping[str, Scheme],
    options: Options,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """The document, its digest included; JSON types only.

    Args:
        names: filled by a load or a probe.
        more: sections of extensions.
    """
    from sglang.srt.distributed import parallel_state

    text_config = getattr(model.config, "text_config", None) or model.config
    sizes = ("num_hidden_layers", "hidden_size", "vocab_size")
    # An expert of another rank lands nowhere here; it is cut as its like on this rank.
    likes: dict[tuple, Landing] = {}
    for known in names.known.values():
        for landing in known.landings:
            if landing.boxes:
                likes.setdefault(_kind_of(known, landing), landing)
    tensors = {
        name: _tensor(name, known, likes, schemes, options) for name, known in names.known.items()
    }
    reason = "in the checkpoint, but no parameter of rank 0 takes it"
    unused = _entry(None, "", UNUSED, reason, "any")
    document: dict[str, Any] = {
        "format": PLAN_FORMAT,
        "version": PLAN_VERSION,
        "model": {
            "architecture": type(model).__name__,
            "model_type": model.config.model_type,
            **{size: getattr(text_config, size, None) for size in sizes},
        },
        "parallel": {
            "tp_size": parallel_state.get_tensor_model_parallel_world_size(),
            "ep_size": parallel_state.get_moe_expert_parallel_world_size(),
        },
        "options": options.model_dump(mode="json"),
        "modules": module_rows(schemes),
        "fp8_bytes": sum(target.parameter.numel() for target in targets.values() if target.is_fp8),
        "tensors": dict(sorted({**tensors, **dict.fromkeys(names.unused, unused)}.items())),
        "left_out": left_out(model, names),
        **more,
    }
    document["digest"] = digest_of(document)
    return document


def _tensor(
    name: str,
    known: Known,
    likes: Mapping[tuple, Landing],
    schemes: Mapping[str, Scheme],
    options: Options,
) -> dict[str, Any]:
    """How a tensor is stored and may be sent."""
    if not known.landings:
        return _entry(known.shape, "", HIGH_PRECISION, known.reason, "float32")
    landings = [likes.get(_kind_of(known, one), one) for one in known.landings]
    # Of several (tied) parameters the quantized one has the say.
    target = max((one.target for one in known.landings), key=lambda target: target.is_fp8)
    owner, _, leaf = target.name.rpartition(".")
    module = getattr(target.module, "fp8rl_prefix", "") or owner
    held = target.format
    if held is None:
        reason = "SGLang builds this module without quantization"
        if module in schemes:
            reason = schemes[module].reason or f"{leaf} of a quantized module"
        return _entry(known.shape, module, HIGH_PRECISION, reason, _name_of(target.parameter.dtype))
    block = held.grid(target.parameter.shape).block
    reason = _why_not_on_the_wire(name, known, landings, held)
    if reason:
        dtype = _name_of(torch.bfloat16 if options.round_to_bf16 else torch.float32)
        return _entry(known.shape, module, held.name, reason, dtype, block)
    entry = _entry(known.shape, module, held.name, "", FP8, block)
    scale_shape = list(held.sent_scale_shapes(known.shape)[0])
    entry["wire"] |= {"scale": held.scale_name(name), "scale_shape": scale_shape}
    return entry


def _entry(
    shape: Sequence[int] | None,
    module: str,
    scheme: str,
    reason: str,
    dtype: str,
    block_size: Sequence[int] | None = None,
) -> dict[str, Any]:
    return {
        "shape": None if shape is None else list(shape),
        "module": module,
        "scheme": scheme,
        "block_size": None if block_size is None else list(block_size),
        "reason": reason,
        "wire": {"dtype": dtype},
    }


def _why_not_on_the_wire(name: str, known: Known, landings: list[Landing], held: Format) -> str:
    """Why a sender can't know the scales of this tensor's parts; empty if it can."""
    if len(known.shape) != 2 or not name.endswith(".weight"):
        return "not one matrix with a name of its own: the engine takes it apart"
    if any(not landing.target.is_fp8 for landing in landings):
        return "a part of it is served in high precision"
    boxes = [box for landing in landings for box in landing.boxes]
    if not boxes:
        return "this rank holds nothing of it, and nothing like it"
    return held.why_not_sent(known.shape, boxes)


def _kind_of(known: Known, landing: Landing) -> tuple:
    """The same for experts of one layer that differ in their number only."""
    shards = tuple(part for part in landing.part if part in ("w1", "w2", "w3"))
    return (id(landing.target), shards or landing.part, known.shape)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
