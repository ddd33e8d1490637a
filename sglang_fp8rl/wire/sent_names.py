"""Names of what travels otherwise than a checkpoint has it: scales of an FP8 KV cache, experts as one tensor.

NeMo-RL sends `….self_attn.k_scale`, `….self_attn.v_scale` and `….self_attn.attn.q_scale`, FP32 of shape `[1]`;
checkpoints of compressed-tensors have the first two. vLLM and SGLang call their own parameters
`….attn.k_scale`, and ModelOpt writes `….k_proj.k_scale`. What is stored is the value over its scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..errors import RefitError
from .plan import RefitPlan

KEYS, VALUES = "k", "v"
_NAME = re.compile(
    r"(?P<attention>.+?)(?:\.attn|\.qkv_proj|\.(?P<of>[qkv])_proj)?\.(?P<side>[qkv]|prob)_scale"
)


class KvScaleName(NamedTuple):
    """What a name of such a scale says."""

    attention: str  # the module it belongs to, as the sender calls it (`model.layers.0.self_attn`)
    side: str  # `k`, `v`, `q` or `prob`


def kv_scale_name(name: str) -> KvScaleName | None:
    """None for every other name; in particular for scales of weights and of activations."""
    if not name.endswith("_scale"):
        return None
    found = _NAME.fullmatch(name)
    if found is None or found["of"] not in (None, found["side"]):
        return None
    return KvScaleName(found["attention"], found["side"])


def why_not_in_plan(name: str, plan: RefitPlan) -> str:
    """Why a server takes a name all the same that its plan has not; empty for any other name."""
    if name in plan.tensors:
        return ""
    if kv_scale_name(name) is not None:
        return "a scale of the KV cache, in no fingerprint; kv_scales of GET /fp8rl/status says what is used"
    may_pass = plan.document["options"].get("unknown_names") == "warn"
    if may_pass and not plan.why_not_needed(name):
        return "no parameter of the server takes it, which only warns (unknown_names)"
    return ""


# `gate_up_proj` is `[E, 2I, H]`, gate rows first; `down_proj` `[E, H, I]`.
FUSED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def matrices_of(prefix: str, leaf: str, fused: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of every expert of the module `prefix`, as views; `leaf` is one of `FUSED_PARTS`."""
    parts = FUSED_PARTS[leaf]
    for expert, weight in enumerate(fused):
        for part, matrix in zip(parts, weight.chunk(len(parts)), strict=True):
            yield f"{prefix}.{expert}.{part}.weight", matrix


def one_by_one(name: str, tensor: Any, plan: RefitPlan) -> Iterator[tuple[str, Any]]:
    """Fused experts as `matrices_of`, where the plan has them so; anything else as it is. Raises `RefitError` for a
    shard of them."""
    prefix, _, leaf = name.rpartition(".")
    is_fused = (
        leaf in FUSED_PARTS
        and name not in plan.tensors
        and all(f"{prefix}.0.{part}.weight" in plan.tensors for part in FUSED_PARTS[leaf])
    )
    is_full = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if is_fused and not is_full:
        raise RefitError(
            name,
            f"a {type(tensor).__name__}",
            "fused experts are taken apart where all of them are at hand",
            "Gather it first: tensor.full_tensor() of a DTensor, assemble() of LocalShards.",
        )
    if is_fused and tensor.dim() == 3:
        yield from matrices_of(prefix, leaf, tensor.detach())
    else:
        yield name, tensor
