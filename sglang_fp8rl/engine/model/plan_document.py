"""The plan of a built model, as the document that trainers read (`plan_schema.json`).

Everything in it is read off the modules and what their loaders did with each name (`names.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from ...config import Options
from ...numerics.grid import PerChannel, ScaleGranularity, granularity_of
from ...scheme import Granularity, Scheme
from ...wire.plan import FP8, PLAN_FORMAT, PLAN_VERSION, UNUSED, digest_of
from .landings import Known, Landing, NameTable, left_out
from .parameters import Target

_NOT_QUANTIZED = "SGLang builds this module without quantization"


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
        model: as SGLang built it; parameters may be on `meta`.
        names: filled by a load or a probe.
        more: sections of extensions.
    """
    maker = _Maker(names, schemes, options)
    tensors = {name: maker.entry(name, known) for name, known in names.known.items()}
    tensors |= {name: _unused() for name in names.unused}
    document: dict[str, Any] = {
        "format": PLAN_FORMAT,
        "version": PLAN_VERSION,
        "model": _model_summary(model),
        "parallel": _parallel_sizes(),
        "options": _as_json(asdict(options)),
        "modules": module_rows(schemes),
        "fp8_bytes": sum(target.parameter.numel() for target in targets.values() if target.is_fp8),
        "tensors": dict(sorted(tensors.items())),
        "left_out": left_out(model),
        **more,
    }
    document["digest"] = digest_of(document)
    return document


def module_rows(schemes: Mapping[str, Scheme]) -> list[dict[str, str]]:
    """One row for each linear module, in the order they were built."""
    return [
        {
            "module": name,
            "scheme": scheme.granularity.value,
            "cause": scheme.cause.value,
            "reason": scheme.reason,
            "activations": scheme.activations,
        }
        for name, scheme in schemes.items()
    ]


class _Maker:
    """Decides, name by name, how a tensor may be sent."""

    def __init__(self, names: NameTable, schemes: Mapping[str, Scheme], options: Options) -> None:
        self._schemes, self._options = schemes, options
        # An expert of another rank lands nowhere here; it is cut as its like on this rank.
        self._likes: dict[tuple, Landing] = {}
        for known in names.known.values():
            for landing in known.landings:
                if landing.boxes:
                    self._likes.setdefault(_kind_of(known, landing), landing)

    def entry(self, name: str, known: Known) -> dict[str, Any]:
        if not known.landings:
            return {
                "shape": list(known.shape),
                "module": "",
                "scheme": Granularity.HIGH_PRECISION.value,
                "block_size": None,
                "reason": known.reason,
                "wire": {"dtype": "float32"},
            }
        landings = [self._likes.get(_kind_of(known, one), one) for one in known.landings]
        # Of several (tied) parameters the quantized one has the say.
        target = max((one.target for one in known.landings), key=lambda target: target.is_fp8)
        module = getattr(target.module, "fp8rl_prefix", "") or target.name.rpartition(".")[0]
        scheme = target.granularity
        entry: dict[str, Any] = {
            "shape": list(known.shape),
            "module": module,
            "scheme": scheme.value,
            "block_size": None,
            "reason": "",
        }
        if not target.is_fp8:
            decided = self._schemes.get(module)
            entry["reason"] = (decided.reason if decided else _NOT_QUANTIZED) or (
                f"{target.name.rpartition('.')[2]} of a quantized module"
            )
            entry["wire"] = {"dtype": _name_of(target.parameter.dtype)}
            return entry
        granularity = granularity_of(scheme, self._options.weight_block_size)
        entry["block_size"] = list(granularity.block(target.parameter.shape))
        entry["reason"] = self._why_not_on_the_wire(name, known, landings, granularity)
        if entry["reason"]:
            rounded = torch.bfloat16 if self._options.round_to_bf16 else torch.float32
            entry["wire"] = {"dtype": _name_of(rounded)}
        else:
            suffix = "_scale" if isinstance(granularity, PerChannel) else "_scale_inv"
            shape = granularity.grid(known.shape).scale_shape
            entry["wire"] = {"dtype": FP8, "scale": name + suffix, "scale_shape": list(shape)}
        return entry

    def _why_not_on_the_wire(
        self, name: str, known: Known, landings: list[Landing], granularity: ScaleGranularity
    ) -> str:
        """Why a sender can't know the scales of this tensor's parts; empty if it can."""
        if len(known.shape) != 2 or not name.endswith(".weight"):
            return "not one matrix with a name of its own: the engine takes it apart"
        if any(not landing.target.is_fp8 for landing in landings):
            return "a part of it is served in high precision"
        boxes = [box for landing in landings for box in landing.boxes]
        if not boxes:
            return "this rank holds nothing of it, and nothing like it"
        if isinstance(granularity, PerChannel):
            wide = known.shape[1]
            narrow = [box for box in boxes if box is None or box.shape[-1] != wide]
            if narrow:
                width = "other" if narrow[0] is None else narrow[0].shape[-1]
                return (
                    f"per channel of a row-parallel shard: a row's scale is over {width} of "
                    f"{wide} columns, on each rank another"
                )
            return ""
        grid = granularity.grid(known.shape)
        if not all(box and grid.is_whole(box.start[-2:], box.shape[-2:]) for box in boxes):
            return "its parts start or end inside a block"
        return ""


def _kind_of(known: Known, landing: Landing) -> tuple:
    """The same for experts of one layer that differ in their number only."""
    shards = tuple(part for part in landing.part if part in ("w1", "w2", "w3"))
    return (id(landing.target), shards or landing.part, known.shape)


def _unused() -> dict[str, Any]:
    return {
        "shape": None,
        "module": "",
        "scheme": UNUSED,
        "block_size": None,
        "reason": "in the checkpoint, but no parameter of rank 0 takes it",
        "wire": {"dtype": "any"},
    }


def _model_summary(model: Any) -> dict[str, Any]:
    config = model.config
    text = getattr(config, "text_config", None) or config
    return {
        "architecture": type(model).__name__,
        "model_type": config.model_type,
        **{
            key: getattr(text, key, None)
            for key in ("num_hidden_layers", "hidden_size", "vocab_size")
        },
    }


def _parallel_sizes() -> dict[str, int]:
    from sglang.srt.distributed import parallel_state

    return {
        "tp_size": parallel_state.get_tensor_model_parallel_world_size(),
        "ep_size": parallel_state.get_moe_expert_parallel_world_size(),
    }


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_json(one) for key, one in value.items()}
    return [_as_json(one) for one in value] if isinstance(value, (list, tuple)) else value
