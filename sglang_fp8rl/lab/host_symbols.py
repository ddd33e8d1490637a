"""What this package uses of SGLang, looked up in the installed one.

It is read off its own sources: imports, attributes of what was imported, and targets of hooks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from ..compat import NEWEST_EXCLUDED, OLDEST, host_version
from ..declared_hooks import find
from ..versions import SESSIONS_SINCE

PACKAGE = Path(__file__).parents[1]
# What not every supported SGLang has, with the first one that does.
SINCE = {
    f"sglang.srt.managers.io_struct.{edge}WeightUpdateReq{way}": Version(SESSIONS_SINCE)
    for edge in ("Begin", "End")
    for way in ("Input", "Output")
} | {
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.end_weight_update": Version(
        SESSIONS_SINCE
    )
}
_PATH = re.compile(r"sglang\.srt(\.\w+)+")


def used_symbols() -> set[str]:
    """Dotted paths in SGLang that the sources of this package name."""
    return {symbol for path in PACKAGE.rglob("*.py") for symbol in _named_in(path)}


def check_symbols() -> list[str]:
    """What the installed SGLang lacks of them, a line each. Imports SGLang."""
    version = host_version() or NEWEST_EXCLUDED
    expected = sorted(path for path in used_symbols() if version >= SINCE.get(path, OLDEST))
    return [f"{path}: not in this SGLang" for path in expected if find(path) is None]


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
