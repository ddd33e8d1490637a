"""A file that a docstring or a comment names is there."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = ("sglang_fp8rl", "benchmarks", "tests", "tools")
FILES = [path for place in PLACES for path in sorted((ROOT / place).rglob("*.*"))]
KNOWN = {
    f"/{path.relative_to(ROOT)}"
    for path in [*FILES, *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
}
NAMED = re.compile(r"(?<![\w./*-])((?:[\w-]+/)*[\w-]+\.(?:py|md))\b")
# Of SGLang, and what an installation of the offline bundle writes.
OF_OTHERS = {"model_runner_components/cuda_graph_setup.py", "version.py"}


def texts(path: Path) -> Iterator[str]:
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def stale(path: Path) -> list[str]:
    named = {name for text in texts(path) for name in NAMED.findall(text)} - OF_OTHERS
    return sorted(name for name in named if not any(one.endswith(f"/{name}") for one in KNOWN))


@pytest.mark.parametrize("place", PLACES)
def test_every_file_that_is_named_exists(place):
    sources = sorted((ROOT / place).rglob("*.py"))
    found = {str(path.relative_to(ROOT)): names for path in sources if (names := stale(path))}
    assert found == {}


def test_a_name_of_no_file_is_found(tmp_path):
    page = tmp_path / "page.py"
    page.write_text('"""As `wire/bucket.py`; not `wire/no_such.py`."""\n# see gone.py\n')
    assert stale(page) == ["gone.py", "wire/no_such.py"]


def test_no_two_files_of_tests_share_a_name():
    """pytest imports them by their names alone; a process that a test starts finds the wrong one."""
    names = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
