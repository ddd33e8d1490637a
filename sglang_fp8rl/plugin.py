"""The SGLang entry point (placeholder)."""

from __future__ import annotations

from sglang_fp8rl.platforms import is_requested


def register() -> None:
    if is_requested():
        from sglang_fp8rl.platforms.cpu_hooks import register_cpu_hooks

        register_cpu_hooks()
