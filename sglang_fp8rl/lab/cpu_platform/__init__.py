"""The CPU reference platform: real SGLang, no GPU, only when `SGLANG_PLATFORM=fp8rl_cpu` asks."""

from __future__ import annotations

from ...compat import check_host, on_cpu_platform

# Names a module whose `make_backend` takes the place of SGLang's torch attention.
ATTENTION_VARIABLE = "SGLANG_FP8RL_CPU_ATTENTION"


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform's class path, or None (not asked for)."""
    return "sglang_fp8rl.lab.cpu_platform.cpu:Fp8RlCpuPlatform" if on_cpu_platform() else None


def register() -> None:
    """Entry point of `sglang.srt.plugins`: the platform's hooks, if it was asked for."""
    if on_cpu_platform() and not check_host():
        from .cpu_hooks import register_cpu_hooks

        register_cpu_hooks()
