"""Which versions of SGLang are supported, and which is installed. Imports no host."""

from __future__ import annotations

import importlib.metadata
import os

from packaging.version import Version

OLDEST, NEWEST_EXCLUDED = Version("0.5.16"), Version("0.5.24")
TESTED = ("0.5.16", "0.5.23")
SESSIONS_SINCE = Version("0.5.21")

# SGLang on a CPU, for checking: an out-of-tree platform that the lab registers with SGLang.
CPU_PLATFORM = "fp8rl_cpu"


def on_cpu_platform() -> bool:
    """Whether this process was started with `SGLANG_PLATFORM=fp8rl_cpu`."""
    return os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM


def installed(package: str) -> Version | None:
    """Its version, or None."""
    try:
        return Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None


def host_version() -> Version | None:
    """The installed SGLang, or None."""
    return installed("sglang")


def check_host() -> list[str]:
    """Why this SGLang can't be served with; empty if it can. Cheap: imports no SGLang."""
    version, supported = host_version(), f">={OLDEST},<{NEWEST_EXCLUDED}"
    if version is None:
        return [f"sglang is not installed; install a version in {supported}"]
    if OLDEST <= version < NEWEST_EXCLUDED:
        return []
    return [
        f"sglang {version} is outside the supported range {supported}; "
        "install a version in it, or a sglang-fp8rl that supports yours"
    ]
