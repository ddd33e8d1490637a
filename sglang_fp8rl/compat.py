"""Which versions of SGLang are supported, and which is installed. Importing this imports no host."""

from __future__ import annotations

import importlib.metadata
import os

from packaging.version import InvalidVersion, Version

from .errors import HostError

OLDEST, NEWEST_EXCLUDED = Version("0.5.16"), Version("0.5.24")
TESTED = ("0.5.16", "0.5.23")
SESSIONS_SINCE = Version("0.5.21")

# Says which release a build of SGLang counts as that is none: a nightly, an image from a shallow clone.
HOST_VERSION_VARIABLE = "SGLANG_FP8RL_HOST_VERSION"

# SGLang on a CPU, for checking: an out-of-tree platform that the lab registers with SGLang.
CPU_PLATFORM = "fp8rl_cpu"


def on_cpu_platform() -> bool:
    """Whether this process was started with `SGLANG_PLATFORM=fp8rl_cpu`."""
    return os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM


def installed(package: str) -> str | None:
    """What it says its version is, which may be no version; None if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release_of(version: str | None) -> Version | None:
    """The release that a version counts as; None for what is no version.

    `0.5.20rc1`, `0.5.20.dev3+g0123abc` and `0.5.20.post1` count as 0.5.20: a build that leads to a release is
    refused, or served with, like that release.
    """
    try:
        return Version(Version(version or "").base_version)
    except InvalidVersion:
        return None


def host_version() -> Version | None:
    """The release that the installed SGLang counts as; None if there is none, or it can't be told."""
    found = installed("sglang")
    if found is None or _variable_problems():
        return None
    return release_of(os.environ.get(HOST_VERSION_VARIABLE) or found)


def host_named() -> str:
    """The installed SGLang as a message names it: `sglang 0.5.23rc1 (counts as 0.5.23)`."""
    by = f" by {HOST_VERSION_VARIABLE}" if os.environ.get(HOST_VERSION_VARIABLE) else ""
    return _named("sglang", host_version(), by)


def check_host() -> list[str]:
    """Why this SGLang can't be served with; empty if it can. Cheap: imports no SGLang."""
    remedy = "install one of these, or a sglang-fp8rl that supports yours"
    if installed("sglang") is not None and not _is_release(installed("sglang")):
        remedy += f"; or set {HOST_VERSION_VARIABLE} to the release that this build was made from"
    problems = _outside(host_named(), host_version(), OLDEST, NEWEST_EXCLUDED, remedy)
    return _variable_problems() or problems


def check_version(package: str, oldest: Version, end: Version, remedy: str) -> list[str]:
    """Why the installed version of a package is not supported; empty if it is. Imports nothing of it."""
    release = release_of(installed(package))
    return _outside(_named(package, release), release, oldest, end, remedy)


def _outside(
    named: str, release: Version | None, oldest: Version, end: Version, remedy: str
) -> list[str]:
    if release is not None and oldest <= release < end:
        return []
    found = named if release is None else f"{named} is outside the range"
    return [f"{found}; supported is >={oldest},<{end}: {remedy}"]


def _named(package: str, release: Version | None, by: str = "") -> str:
    found = installed(package)
    if found is None:
        return f"{package} is not installed"
    if release is None:
        return f"{package} {found!r} says no release"
    return f"{package} {found}" + ("" if str(release) == found else f" (counts as {release}{by})")


def _is_release(version: str | None) -> bool:
    return release_of(version) is not None and not Version(version or "").is_prerelease


def _variable_problems() -> list[str]:
    """What is wrong with the variable, if it is set."""
    found, said = installed("sglang"), os.environ.get(HOST_VERSION_VARIABLE)
    if not said:
        return []
    release = release_of(said)
    if release is None or release != Version(said):
        rule = "it is the release that your build was made from, such as 0.5.23"
    elif _is_release(found) and release != release_of(found):
        rule = f"sglang {found} is a release, which counts as itself"
    else:
        return []
    return [str(HostError(HOST_VERSION_VARIABLE, repr(said), rule, "Correct it, or unset it."))]
