"""`GET /fp8rl/plan`: what a trainer may send to a server that runs (`plan_schema.json`).

Everything in it is read off the modules that were built and what their loaders did with each name (`landings.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import torch
from starlette.responses import Response

from ...formats import Format
from ...scheme import HIGH_PRECISION, module_rows
from ...wire.plan import FP8, PLAN_FORMAT, PLAN_PATH, PLAN_VERSION, UNUSED, RefitPlan, digest_of
from ..extension import Extension, extensions
from ..host.boundary import Boundary
from ..host.status import internal_states, not_served, refused
from ..model.landings import Known, Landing, left_out
from ..refit import ModelRefit

_MARK = "fp8rl-plan:"  # and the digest of the plan that the client knows
_PLAN, _DIGEST, _ERROR = "fp8rl_plan", "fp8rl_plan_digest", "fp8rl_plan_error"


async def serve_plan(request: Any) -> Response:
    """`If-None-Match` with a digest is answered 304 without the document where the server's is the same."""
    known = request.headers.get("if-none-match", "").strip('"')
    state = (await internal_states(_MARK + known))[0]
    if _ERROR in state:
        return refused(state[_ERROR], HTTPStatus.INTERNAL_SERVER_ERROR)
    if _DIGEST not in state:
        return not_served()
    tag = {"ETag": f'"{state[_DIGEST]}"'}
    if _PLAN not in state:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=tag)
    return Response(state[_PLAN], media_type="application/json", headers=tag)


class Plan(Extension):
    """The plan of one model, made when it is first asked for."""

    routes = {PLAN_PATH: serve_plan}  # noqa: RUF012
    mark = _MARK

    @functools.cached_property
    def made(self) -> RefitPlan:
        """The public document. Raises `HostError` where the model's loaders need values."""
        return RefitPlan.from_dict(_document(self.refit))

    def answer(self, scheduler: Any, asked: str) -> dict[str, Any]:
        boundary = Boundary(scheduler.weight_updater.tp_cpu_group)
        state = boundary.step(self._state, asked)
        return state or {_ERROR: " | ".join(boundary.errors)}

    def _state(self, known: str) -> dict[str, Any]:
        """The plan, for a client that knows the one with the digest `known`."""
        state: dict[str, Any] = {_DIGEST: self.made.digest}
        if known != self.made.digest:
            state[_PLAN] = json.dumps(self.made.document, ensure_ascii=False)
        return state


# -- the document: JSON types only -----------------------------------------------------------------


def _document(refit: ModelRefit) -> dict[str, Any]:
    from sglang.srt.distributed import parallel_state

    names = refit.learned_names()
    config: Any = refit.model.config
    text_config = getattr(config, "text_config", None) or config
    sizes = ("num_hidden_layers", "hidden_size", "vocab_size")
    # An expert of another rank lands nowhere here; it is cut as its like on this rank.
    likes: dict[tuple, Landing] = {}
    for known in names.known.values():
        for landing in known.landings:
            if landing.boxes:
                likes.setdefault(_kind_of(known, landing), landing)
    tensors = {name: _tensor(name, known, likes, refit) for name, known in names.known.items()}
    reason = "in the checkpoint, but no parameter of rank 0 takes it"
    tensors |= dict.fromkeys(names.unused, _entry(None, "", UNUSED, reason, "any"))
    targets = refit.targets.values()
    document: dict[str, Any] = {
        "format": PLAN_FORMAT,
        "version": PLAN_VERSION,
        "model": {
            "architecture": type(refit.model).__name__,
            "model_type": config.model_type,
            **{size: getattr(text_config, size, None) for size in sizes},
        },
        "parallel": {
            "tp_size": parallel_state.get_tensor_model_parallel_world_size(),
            "ep_size": parallel_state.get_moe_expert_parallel_world_size(),
        },
        "options": refit.options.model_dump(mode="json"),
        "modules": module_rows(refit.schemes),
        "fp8_bytes": sum(target.parameter.numel() for target in targets if target.is_fp8),
        "tensors": dict(sorted(tensors.items())),
        "left_out": left_out(refit.model, names),
    }
    for kind in extensions():
        document |= kind.planned(refit)
    document["digest"] = digest_of(document)
    return document


def _tensor(
    name: str, known: Known, likes: Mapping[tuple, Landing], refit: ModelRefit
) -> dict[str, Any]:
    """How a tensor is stored and may be sent."""
    shape, schemes = known.shape, refit.schemes
    if not known.landings:
        return _entry(shape, "", HIGH_PRECISION, known.reason, "float32")
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
        return _entry(shape, module, HIGH_PRECISION, reason, _name_of(target.parameter.dtype))
    block = held.grid(target.parameter.shape).block
    reason = _why_not_on_the_wire(name, known, landings, held)
    if reason:
        dtype = _name_of(torch.bfloat16 if refit.options.round_to_bf16 else torch.float32)
        return _entry(shape, module, held.name, reason, dtype, block)
    entry = _entry(shape, module, held.name, "", FP8, block)
    scale_shape = list(held.sent_scale_shapes(shape)[0])
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
    grid = held.grid(known.shape)
    if not all(box and grid.is_whole(box.start[-2:], box.shape[-2:]) for box in boxes):
        return (
            f"its parts start or end inside a block {list(grid.block)} (per channel: a row of a "
            "row-parallel weight), and have scales of their own"
        )
    return ""


def _kind_of(known: Known, landing: Landing) -> tuple:
    """The same for experts of one layer that differ in their number only."""
    shards = tuple(part for part in landing.part if part in ("w1", "w2", "w3"))
    return (id(landing.target), shards or landing.part, known.shape)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
