"""Which versions of SGLang are supported, and which is installed. Importing this imports no host."""

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
    remedy = "install one of these, or a sglang-fp8rl that supports yours"
    return check_version("sglang", OLDEST, NEWEST_EXCLUDED, remedy)


def check_version(package: str, oldest: Version, end: Version, remedy: str) -> list[str]:
    """Why the installed version of a package is not supported; empty if it is. Imports nothing of it."""
    version = installed(package)
    if version is not None and oldest <= version < end:
        return []
    found = "is not installed" if version is None else f"{version} is outside the range"
    return [f"{package} {found}; supported is >={oldest},<{end}: {remedy}"]
