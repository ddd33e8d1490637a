"""Draft models: SGLang serves them beside their target, in high precision, and the method leaves them to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from .compare import differences, is_same
from .host import Builder
from .names import Shapes, called, of_loader
from .naming import ENOUGH, weights
from .outcome import Row, line_of

IS_DRAFT = re.compile(
    r"Eagle3.*|.*(NextN|MTP|Eagle3?|DSpark|DraftModel|AssistantForCausalLM|AssistantModel)"
    r"|(DFlash|DSpark|LingDSpark|Qwen3DSpark).*"
)


def judge_draft(builder: Builder, draft: Any, row: Row, names: Shapes | None = None) -> Shapes:
    """Whether SGLang's own update of it leaves the bytes of a fresh load; the row says it.

    Args:
        names: of its checkpoint, where they are known.

    Returns:
        The names that reached it; none if they reach too little.
    """
    best: Shapes = {}
    own = called(row.architecture, of_loader(draft))
    row.held = len(dict(draft.named_parameters()))
    for shapes in [names] if names else _names(own, draft):
        try:
            reached = _reached(draft, shapes)
        except Exception as error:  # noqa: BLE001  the row says it
            row.reasons.append(line_of(error))
            continue
        if reached > row.reached:
            row.reached, best = reached, shapes
    if row.reached < ENOUGH * row.held:
        row.reasons.append(f"its names reach {row.reached} of {row.held} parameters")
        return {}
    row.kind, row.reasons, row.names, row.named_by = "draft", [], len(best), "its loader"
    fresh, _ = builder.build(is_quantized=False)
    _load(fresh, best, 2)
    _load(draft, best, 2)
    differing = sorted(differences(draft, fresh))
    if differing:
        row.reasons = [f"SGLang's own update leaves {', '.join(differing)} unlike a fresh load"]
    return best


def _names(own: Shapes, draft: Any) -> Iterator[Shapes]:
    """What a checkpoint may call a draft's tensors: as the model does, as a layer behind its target's, or `mtp.`"""
    yield own
    config = getattr(draft, "config", None)
    config = getattr(config, "text_config", config)
    layer = f"model.layers.{getattr(config, 'num_hidden_layers', 0)}."
    yield {_embedded(name, layer): one for name, one in own.items()}
    yield {name.removeprefix("model."): one for name, one in own.items()}
    yield {f"mtp.{name.removeprefix('model.')}": one for name, one in own.items()}


def _embedded(name: str, layer: str) -> str:
    if name.startswith("lm_head."):
        return f"{layer}shared_head.head.{name.removeprefix('lm_head.')}"
    bare = re.sub(r"^(model\.)?((mtp_block|decoder|mtp_layers\.0|layers\.0)\.)?", "", name)
    return layer + bare


def _reached(draft: Any, shapes: Shapes) -> int:
    """How many parameters change with other weights."""
    _load(draft, shapes, 0)
    before = {name: one.detach().clone() for name, one in draft.named_parameters()}
    _load(draft, shapes, 1)
    return sum(not is_same(one.data, before[name]) for name, one in draft.named_parameters())


def _load(draft: Any, shapes: Shapes, seed: int) -> None:
    with torch.no_grad():
        draft.load_weights(iter(weights(shapes, seed).items()))
