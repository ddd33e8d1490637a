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
# A point of a list: why, in bold, and then its places: a file, what in it, and the versions that have it.
_POINT = re.compile(r"^- \*\*.+?\.\*\*\s+(.+?)(?=\n- |\n\n|\Z)", re.MULTILINE | re.DOTALL)
_PLACE = re.compile(r"`([\w/]+\.py)(?:::([\w.]+))?`(?: \(([\d.]+)(\+|–[\d.]+)?\))?")
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


def judged(page: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """File, what in it, and the tested versions that have it; what is no place where one should be is an error."""
    for point in _POINT.findall(page):
        for place in re.split(r",\s+", point.strip()):
            found = _PLACE.fullmatch(" ".join(place.split()))
            assert found is not None, f"no place: {place}"
            file, where, first, rest = found.groups()
            yield file, where or _MODULE, versions(first, rest)


def versions(first: str | None, rest: str | None) -> tuple[str, ...]:
    if first is None:
        return TESTED
    begin = TESTED.index(first)
    end = begin if rest is None else len(TESTED) if rest == "+" else TESTED.index(rest[1:])
    return TESTED[begin : end + 1]


def test_each_place_is_found_by_what_it_is_in():
    source = (
        'A = ["fp8"]\nclass B:\n    def c(self, x):\n        """fp8"""\n        return x == "fp8"\n'
    )
    assert places_of(source) == {_MODULE, "B.c"}
    assert places_of('x = "fp8_e5m2"  # "fp8"') == set()


def test_each_place_of_the_page_is_read_with_its_versions():
    page = (
        "## No effect\n\n- **A `x.py`. Why: so.** `a/b.py`, `c.py::D.e` (0.5.19+),\n  `c.py::f` (0.5.16–0.5.20)\n"
        "- **More.** `g.py::h` (0.5.23)\n\nText of `i.py`.\n"
    )
    assert list(judged(page)) == [
        ("a/b.py", _MODULE, TESTED),
        ("c.py", "D.e", ("0.5.19", "0.5.20", "0.5.23")),
        ("c.py", "f", ("0.5.16", "0.5.19", "0.5.20")),
        ("g.py", "h", ("0.5.23",)),
    ]
    with pytest.raises(AssertionError, match="no place"):
        list(judged("- **Why.** `c.py::D.e` (0.5.19+) and more\n"))


def test_no_place_is_judged_twice():
    places = [place[:2] for place in judged(DOCUMENT.read_text())]
    assert len(places) == len(set(places)) > 50


@pytest.mark.skipif(str(host_version()) not in TESTED, reason="the table is of tested versions")
def test_the_table_has_every_place_of_the_installed_sglang_and_no_other():
    pytest.importorskip("sglang")
    version = str(host_version())
    known = {(file, where) for file, where, has in judged(DOCUMENT.read_text()) if version in has}
    found = installed()
    assert found - known == set(), "new places: judge them in docs/hosts_fp8_names.md"
    assert known - found == set(), "gone: take them out of docs/hosts_fp8_names.md"
