"""What every judge's process has before it is forked: the environment, SGLang, and a hook that hands it over."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

ENVIRONMENT = {
    "SGLANG_PLATFORM": "fp8rl_cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false",
    # What is not here is not fetched: a class that asks the hub for something gets a row.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def prepare_environment() -> None:
    """Before torch and SGLang are imported."""
    os.environ.update(ENVIRONMENT)


class Judged(BaseException):
    """Leaves SGLang's start. Not an `Exception`: SGLang catches those."""


judges: list[Callable[..., None]] = []


def _take_over(loader: Any, *, model_config: Any, **_: Any) -> None:
    judges[-1](model_config, loader.load_config)
    raise Judged


def import_sglang() -> None:
    """Everything that takes seconds, once for all processes that are forked from this one.

    Side effects on the host: SGLang's loader of dummy weights builds no model here, it hands its config to a judge.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_fp8rl.lab.testing import preload  # noqa: F401

    HookRegistry.register(
        "sglang.srt.model_loader.loader.DummyModelLoader.load_model", _take_over, HookType.REPLACE
    )
    load_plugins()
