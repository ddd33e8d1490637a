"""A small plan made by hand, for tests of the trainer's side."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from sglang_fp8rl.wire.plan import RefitPlan, digest_of

BLOCKWISE, PER_CHANNEL, PLAIN = "blockwise", "per_channel", "high_precision"


def make_plan(shapes: dict[str, tuple[Any, ...]], **options: Any) -> RefitPlan:
    """`shapes`: name to scheme and full shape, and the columns of a rank if a row has several scales.

    Per channel is on the wire, as at TP 1; not where a row has several scales.
    """
    return plan_with(
        options,
        tensors={name: _entry(name, *entry) for name, entry in shapes.items()},
        left_out=[{"pattern": r"(^|\.)lm_head\.weight$", "reason": "tied to the embedding"}],
    )


def plan_with(options: dict[str, Any], **parts: Any) -> RefitPlan:
    """A plan with these options beside the usual ones, and these parts of its document."""
    document: dict[str, Any] = {
        "format": "sglang-fp8rl/plan",
        "version": 1,
        "model": {
            "architecture": "Tiny",
            "model_type": "tiny",
            "num_hidden_layers": 1,
            "hidden_size": 1,
            "vocab_size": None,
        },
        "parallel": {"tp_size": 1, "ep_size": 1},
        "options": {
            "weight_block_size": [128, 128],
            "use_weight_pow2_scale": False,
            "round_to_bf16": True,
            **options,
        },
        "modules": [],
        "fp8_bytes": 0,
        "left_out": [],
        **parts,
    }
    return RefitPlan.from_dict(document | {"digest": digest_of(document)})


def _entry(
    name: str, scheme: str, shape: tuple[int, ...], columns: int | None = None
) -> dict[str, Any]:
    block, suffix = (
        ((128, 128), "_scale_inv") if scheme == BLOCKWISE else ((1, columns or shape[-1]), "_scale")
    )
    wire: dict[str, Any] = {"dtype": "bfloat16"}
    if scheme != PLAIN and columns is None:
        grid = [-(-size // step) for size, step in zip(shape, block, strict=True)]
        wire = {"dtype": "float8_e4m3fn", "scale": name + suffix, "scale_shape": grid}
    return {
        "shape": list(shape),
        "module": name.rpartition(".")[0],
        "scheme": scheme,
        "block_size": None if scheme == PLAIN else list(block),
        "reason": "not quantized" if scheme == PLAIN else "",
        "wire": wire,
    }


def plan_schema() -> dict[str, Any]:
    """The JSON schema of every plan's document, as it is installed."""
    return json.loads(resources.files("sglang_fp8rl.wire").joinpath("plan_schema.json").read_text())
