"""Which versions of SGLang are supported, and which is installed. Importing this imports no host."""

from __future__ import annotations

import importlib.metadata
import os

from packaging.version import InvalidVersion, Version

from .errors import HostError

OLDEST, NEWEST_EXCLUDED = Version("0.5.16"), Version("0.5.24")
TESTED = ("0.5.16", "0.5.19", "0.5.20", "0.5.23")

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
    found, said = installed("sglang"), os.environ.get(HOST_VERSION_VARIABLE)
    return None if found is None or _wrong_variable(found, said) else release_of(said or found)


def host_named() -> str:
    """The installed SGLang, for a message: `sglang 0.5.23rc1 (counts as 0.5.23)`."""
    return _named("sglang", host_version())


def check_host() -> list[str]:
    """Why this SGLang can't be served with; empty if it can. Cheap: imports no SGLang."""
    found = installed("sglang")
    remedy = "install one of these, or a sglang-fp8rl that supports yours"
    if found is not None and not _is_release(found):
        remedy += f"; or set {HOST_VERSION_VARIABLE} to the release that this build was made from"
    wrong = _wrong_variable(found, os.environ.get(HOST_VERSION_VARIABLE))
    return wrong or check_version("sglang", OLDEST, NEWEST_EXCLUDED, remedy, host_version())


def check_version(
    package: str, oldest: Version, end: Version, remedy: str, release: Version | None = None
) -> list[str]:
    """Why the installed version of a package is not supported; empty if it is. Imports nothing of it.

    Args:
        release: that it counts as; what it says itself if None.
    """
    release = release or release_of(installed(package))
    if release is not None and oldest <= release < end:
        return []
    found = _named(package, release) + (" is outside the range" if release else "")
    return [f"{found}; supported is >={oldest},<{end}: {remedy}"]


def _named(package: str, release: Version | None) -> str:
    found = installed(package)
    if found is None or release is None:
        return (
            f"{package} is not installed" if found is None else f"{package} {found!r} is no version"
        )
    by = "" if release == release_of(found) else f" by {HOST_VERSION_VARIABLE}"
    return f"{package} {found}" + ("" if str(release) == found else f" (counts as {release}{by})")


def _is_release(version: str) -> bool:
    return release_of(version) is not None and not Version(version).is_prerelease


def _wrong_variable(found: str | None, said: str | None) -> list[str]:
    """What is wrong with the variable, if it is set."""
    release = release_of(said)
    if said and (release is None or release != Version(said)):
        rule = "it is the release that your build was made from, such as 0.5.23"
    elif said and found and _is_release(found) and release != release_of(found):
        rule = f"sglang {found} is a release, which counts as itself"
    else:
        return []
    return [str(HostError(HOST_VERSION_VARIABLE, repr(said), rule, "Correct it, or unset it."))]
