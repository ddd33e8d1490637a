"""Engines with an FP8 cache, weights that move their exponents, and what the status says of these."""

from __future__ import annotations

import torch

from support.engine.commands import status
from support.engine.kv_commands import FP8_CACHE
from support.engine.options import overridden
from support.engine.pool import engine_key

LONGER = list(range(3, 43))  # a prompt that is cached
PROMPT = list(range(30, 50))
TOKENS = torch.randint(3, 512, (96,), generator=torch.Generator().manual_seed(3)).tolist()


def with_fp8_cache(model: str, layout: str = "tp1"):
    return engine_key(model, layout, FP8_CACHE, "fp8-cache", radix_cache=True)


def calibrated(**options):
    return (*FP8_CACHE, *overridden(kv_scales="calibrated", **options))


def with_calibration(model, layout="tp1"):
    args = calibrated(kv_calibration_tokens=TOKENS)
    return engine_key(model, layout, args, "calibrated", radix_cache=True)


def drifted(weights, binades: int = 6):
    """Values of one layer that are `2**binades` as large: its exponent has to move."""
    return {
        name: tensor * 2.0**binades if "layers.0.self_attn.v_proj" in name else tensor
        for name, tensor in weights.items()
    }


def exponents_of(one):
    layers = one["kv_scales"]["layers"]
    return [(layer["keys"]["exponent"], layer["values"]["exponent"]) for layer in layers]


def largest_of(one):
    layers = one["kv_scales"]["layers"]
    return [(layer["keys"]["largest"], layer["values"]["largest"]) for layer in layers]


def kv_status(host):
    return host.call(status)["kv_scales"]
