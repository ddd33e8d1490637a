"""Starts of an engine that are meant to fail, and options as a command line gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.engine.engine_host import command_line, run_rank
from support.engine.forked import CONTEXT, run_forked
from support.engine.pool import EngineKey, engine_key


def overridden(**options: Any) -> tuple[str, str]:
    """The command-line argument that sets these options."""
    config = {"quant_method": "fp8_blockwise_online", **options}
    return ("--json-model-override-args", json.dumps({"quantization_config": config}))


EXPERTS = "model.layers.0.mlp.experts"


def plain_experts(layout: str) -> EngineKey:
    """Experts of the first layer in BF16, those of the second in FP8 with powers of two as scales."""
    options = overridden(ignored_layers=[EXPERTS], use_weight_pow2_scale=True)
    return engine_key("qwen3-moe", layout, options, "plain-experts")


def log_of_a_failed_start(model_path: Path, log: Path, args: tuple[str, ...]) -> str:
    """Start a scheduler as a server does and wait for it to give up; what it logged."""
    argv = [*command_line(model_path, "fp8_blockwise_online"), *args]
    ours, theirs = CONTEXT.Pipe()
    with ours, theirs:
        ended = run_forked(run_rank, (theirs, argv, 1, 0, None, {}), log)
    assert "exit status" in ended, log.read_text()
    return log.read_text()
