"""What a trainer that quantizes before the transfer sends to an engine."""

from __future__ import annotations

import random
from typing import Any

import torch

from support.by_definition import quantize_blockwise, quantize_per_channel
from support.engine.commands import plan_document

_QUANTIZE = {"blockwise": quantize_blockwise, "per_channel": quantize_per_channel}


def in_fp8(host: Any, which: str) -> list[tuple[str, torch.Tensor]]:
    """A weight set, with FP8 and scales for what the plan says may travel so; a scale may come before its weight."""
    tensors, sent = host.call(plan_document)["tensors"], []
    for name, weight in getattr(host.model, which).items():
        wire = tensors[name]["wire"]
        if "scale" in wire:
            codes, scale = _QUANTIZE[tensors[name]["scheme"]](weight)
            sent += [(name, codes), (wire["scale"], scale)]
        else:
            sent.append((name, weight))
    random.Random(0).shuffle(sent)
    return sent
