"""Starts of an engine that are meant to fail, and starts with other environment variables."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import engine_host

LONGEST_START_SECONDS = 240


def overridden(**options: Any) -> tuple[str, str]:
    """The command-line argument that sets these options."""
    config = {"quant_method": "fp8_blockwise_online", **options}
    return ("--json-model-override-args", json.dumps({"quantization_config": config}))


def log_of_a_failed_start(model_path: Path, log: Path, args: tuple[str, ...]) -> str:
    """Start a scheduler as a server does and wait for it to give up; what it logged."""
    argv = ["--model-path", str(model_path), "--skip-tokenizer-init", "--device", "cpu"]
    argv += ["--quantization", "fp8_blockwise_online", *args]
    ours, theirs = engine_host._CONTEXT.Pipe()
    process = engine_host._CONTEXT.Process(target=_fail, args=(theirs, argv, log), daemon=True)
    process.start()
    theirs.close()
    process.join(timeout=LONGEST_START_SECONDS)
    started = process.is_alive()
    process.kill()
    process.join()
    ours.close()
    assert not started, log.read_text()
    return log.read_text()


def _fail(pipe: Any, argv: list[str], log: Path) -> None:
    import psutil

    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # A scheduler that fails sends SIGQUIT to its launcher; here that is the fork server.
    psutil.Process.send_signal = lambda self, number: None  # type: ignore[method-assign]
    engine_host._run_rank(pipe, argv, 1, 0, None)


def run_rank_with_ignored_layers(*args: Any) -> None:
    """`engine_host._run_rank` with SGLang's variable set. The fork server keeps its own copy of
    the environment, so setting the variable in the test would not reach the scheduler."""
    os.environ["SGLANG_FP8_IGNORED_LAYERS"] = IGNORED_IN_ENVIRONMENT
    engine_host._run_rank(*args)


IGNORED_IN_ENVIRONMENT = "model.layers.0.mlp, model.layers.1.self_attn.o_proj"
