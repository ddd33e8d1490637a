"""The CPU reference platform: real SGLang, no GPU, only when `SGLANG_PLATFORM=fp8rl_cpu` asks."""

from __future__ import annotations

import os

PLATFORM_NAME = "fp8rl_cpu"


def is_requested() -> bool:
    """Whether this process was started with `SGLANG_PLATFORM=fp8rl_cpu`."""
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform's class path, or None (not asked for)."""
    return "sglang_fp8rl.platforms.cpu:Fp8RlCpuPlatform" if is_requested() else None
