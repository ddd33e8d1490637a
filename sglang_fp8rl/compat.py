"""Which versions of SGLang are supported, which is installed, and what of it this package uses.

What it uses is read off its own sources: imports, attributes of what was imported, and targets of hooks.
`sglang-fp8rl doctor` and a test look each up in the installed SGLang. Importing this imports no host.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

OLDEST, NEWEST_EXCLUDED = Version("0.5.16"), Version("0.5.24")
TESTED = ("0.5.16", "0.5.23")
SESSIONS_SINCE = Version("0.5.21")

# SGLang on a CPU, for checking: an out-of-tree platform that the lab registers with SGLang.
CPU_PLATFORM = "fp8rl_cpu"

PACKAGE = Path(__file__).parent
# What not every supported SGLang has, with the first one that does.
SINCE = {
    f"sglang.srt.managers.io_struct.{edge}WeightUpdateReq{way}": SESSIONS_SINCE
    for edge in ("Begin", "End")
    for way in ("Input", "Output")
}
_PATH = re.compile(r"sglang\.srt(\.\w+)+")


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


def host_symbols() -> set[str]:
    """Dotted paths in SGLang that the sources of this package name."""
    return {symbol for path in PACKAGE.rglob("*.py") for symbol in _named_in(path)}


def check_symbols() -> list[str]:
    """What the installed SGLang lacks of them, a line each. Imports SGLang."""
    version = host_version() or NEWEST_EXCLUDED
    expected = sorted(path for path in host_symbols() if version >= SINCE.get(path, OLDEST))
    return [f"{path}: not in this SGLang" for path in expected if find(path) is None]


def find(path: str) -> object:
    """What the dotted path leads to, or None. Imports what is on the way."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


def _named_in(path: Path) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names: dict[str, str] = {}  # bound here: path in SGLang
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {one.name: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    names = {name: path for name, path in names.items() if path.split(".")[0] == "sglang"}
    yield from names.values()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = names.get(node.value.id)
            if owner is not None and not node.attr.startswith("__"):
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Constant) and _PATH.fullmatch(str(node.value)):
            yield str(node.value)
