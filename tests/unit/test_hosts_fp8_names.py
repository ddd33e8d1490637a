"""Every place of the installed SGLang that has the name "fp8" is judged in `docs/hosts_fp8_names.md`."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_fp8rl.compat import TESTED, host_version

DOCUMENT = Path(__file__).parents[2] / "docs" / "hosts_fp8_names.md"
_ROW = re.compile(r"^\| `(?P<file>[^`]+\.py)` \| (?P<where>[^|]+) \| (?P<versions>[^|]+) \|")
_MODULE = "(module)"


def places_of(source: str) -> set[str]:
    """Functions and classes (or the module) that have the string, by qualified name."""
    found = set()

    def search(node: ast.AST, inside: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and child.value == "fp8":
                found.add(".".join(inside) or _MODULE)
            is_named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            search(child, (*inside, child.name) if is_named else inside)

    search(ast.parse(source), ())
    return found


def installed() -> set[tuple[str, str]]:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent / "srt"
    return {
        (path.relative_to(root).as_posix(), where)
        for path in root.rglob("*.py")
        if re.search(r"""["']fp8["']""", source := path.read_text(errors="replace"))
        for where in places_of(source)
    }


def judged() -> Iterator[tuple[str, str, list[str]]]:
    for line in DOCUMENT.read_text().splitlines():
        row = _ROW.match(line)
        if row:
            yield row["file"], row["where"].strip("` "), row["versions"].split(", ")


def test_each_place_is_found_by_what_it_is_in():
    source = (
        'A = ["fp8"]\nclass B:\n    def c(self, x):\n        """fp8"""\n        return x == "fp8"\n'
    )
    assert places_of(source) == {_MODULE, "B.c"}
    assert places_of('x = "fp8_e5m2"  # "fp8"') == set()


@pytest.mark.skipif(str(host_version()) not in TESTED, reason="the table is of tested versions")
def test_the_table_has_every_place_of_the_installed_sglang_and_no_other():
    pytest.importorskip("sglang")
    version = str(host_version())
    known = {(file, where) for file, where, versions in judged() if version in versions}
    found = installed()
    assert found - known == set(), "new places: judge them in docs/hosts_fp8_names.md"
    assert known - found == set(), "gone: take them out of docs/hosts_fp8_names.md"
