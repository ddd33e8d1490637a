"""What of SGLang this package uses, read off its own sources: imports, attributes of what was imported, and hooks.

There is no list to keep: `sglang-fp8rl doctor` and a test look every use up in the installed SGLang. Importing
this imports no host.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.version import Version

from .compat import SESSIONS_SINCE, host_version

PACKAGE = Path(__file__).parent
_PATH = re.compile(r"sglang\.srt(\.\w+)+")
_ENTRY_POINT_GROUPS = {"sglang.srt.plugins", "sglang.srt.platforms"}

# What not every supported SGLang has, with the first one that does.
SINCE = {
    f"sglang.srt.managers.io_struct.{name}": SESSIONS_SINCE
    for name in (
        "BeginWeightUpdateReqInput",
        "BeginWeightUpdateReqOutput",
        "EndWeightUpdateReqInput",
        "EndWeightUpdateReqOutput",
    )
}


def host_symbols() -> set[str]:
    """Dotted paths in SGLang that the sources of this package name."""
    return {symbol for path in PACKAGE.rglob("*.py") for symbol in _named_in(path)}


def check_symbols(hooked: Iterable[str] = ()) -> list[str]:
    """What the installed SGLang lacks of them, a line each. Imports SGLang.

    Args:
        hooked: targets of hooks, which are put together when they are declared.
    """
    version = host_version()
    wanted = sorted(host_symbols() | {target for target in hooked if _PATH.fullmatch(target)})
    return [
        f"{path}: not in this SGLang"
        for path in wanted
        if is_expected(path, version) and find(path) is None
    ]


def is_expected(path: str, version: Version | None) -> bool:
    """Whether an SGLang of that version has it."""
    return version is None or path not in SINCE or version >= SINCE[path]


def find(path: str) -> object:
    """What the dotted path leads to, or None. Imports what is on the way."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


def _named_in(path: Path) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = dict(pair for node in nodes for pair in _imported(node))  # bound here: path in SGLang
    yield from names.values()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = names.get(node.value.id)
            if owner is not None and not node.attr.startswith("__"):
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _paths_in(node.value)


def _paths_in(text: str) -> Iterator[str]:
    if _PATH.fullmatch(text) and text not in _ENTRY_POINT_GROUPS:
        yield text


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
        yield from ((name.asname or name.name, f"{node.module}.{name.name}") for name in node.names)
    elif isinstance(node, ast.Import):
        yield from (
            (one.name, one.name) for one in node.names if one.name.split(".")[0] == "sglang"
        )
