"""What the package's sources use of SGLang, read with `ast`: nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "sglang_fp8rl"
# It lists what is compared here.
LIST = PACKAGE / "host_symbols.py"
_PATH = re.compile(r"sglang(\.\w+)+")
_ENTRY_POINT_GROUPS = {"sglang.srt.plugins", "sglang.srt.platforms"}


@dataclass
class Uses:
    """Of the host, over all files.

    Attributes:
        symbols: dotted paths: imported names, attributes of imported names, and string constants.
        overridden: methods of classes whose base is the host's: `path of the base.method`.
        texts: string constants, for names that are looked up in an imported module.
    """

    symbols: set[str] = field(default_factory=set)
    overridden: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)


def uses_of_the_host() -> Uses:
    uses = Uses()
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != LIST:
            _read(path, uses)
    return uses


def _read(path: Path, uses: Uses) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = dict(pair for node in nodes for pair in _imported(node))  # bound here: path on the host
    uses.symbols.update(names.values())
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    texts = {text for text in texts if isinstance(text, str)}
    uses.texts |= texts
    uses.symbols |= {text for text in texts if _PATH.fullmatch(text)} - _ENTRY_POINT_GROUPS
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            host = names.get(node.value.id)
            if host is not None and not node.attr.startswith("__"):
                uses.symbols.add(f"{host}.{node.attr}")
        elif isinstance(node, ast.ClassDef):
            uses.overridden |= _methods_over(node, names)


def _methods_over(node: ast.ClassDef, names: dict[str, str]) -> set[str]:
    bases = [
        names[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in names
    ]
    methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
    return {f"{base}.{name}" for base in bases for name in methods if name[0] != "_"}


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
        yield from ((name.asname or name.name, f"{node.module}.{name.name}") for name in node.names)
    elif isinstance(node, ast.Import):
        found = (name.name for name in node.names)
        yield from ((name, name) for name in found if name.split(".")[0] == "sglang")
