"""Every change that is made to SGLang, torch or veRL beside the declared hooks has its row in docs/host.md.

Read off the sources: what is assigned to, or deleted, on an object that is not this package's; `setattr`;
and calls that change a process. An attribute is this package's own if one of its classes declares it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sglang_fp8rl"
LEDGER = (ROOT / "docs" / "host.md").read_text()
HOSTS = {"sglang", "torch", "verl", "gc", "multiprocessing"}
# Of modules, registries and layers of a host; a class of ours has methods of other names.
CHANGING = {
    "append",
    "disable",
    "enable",
    "freeze",
    "register",
    "register_parameter",
    "set_default_dtype",
    "set_quant_config",
    "set_sharing_strategy",
    "set_start_method",
    "set_weight_attrs",
    "add_quantization_method_choices",
    "register_attention_backend",
}
# Of this package's attributes, those that hold an object of a host, or that an object of a host has too.
LENT = {"data", "owner", "mode", "_session"}
# Objects of other libraries, made here: an HTTP session, the tokenizer of a seeded checkpoint.
NO_HOST = {
    "self._http.headers",
    "tokenizer.pre_tokenizer",
    "tokenizer.decoder",
    "fast.chat_template",
}
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def attributes_of(tree: ast.Module) -> Iterator[str]:
    """What classes declare: fields, and what their methods set on `self`."""
    for made in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(made):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield from (node.attr for one in [node.value] if is_own(one))


def is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def host_names(tree: ast.Module) -> set[str]:
    """Names bound by imports from a host, and by assignments of what lies in them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            if (node.module or "").split(".")[0] in HOSTS:
                names |= {one.asname or one.name for one in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                one.asname or one.name.split(".")[0]
                for one in node.names
                if one.name.split(".")[0] in HOSTS
            }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(
            node.value, (ast.Attribute, ast.Name)
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if root_of(node.value) in names:
                names |= {one.id for one in targets if isinstance(one, ast.Name)}
    return names


def root_of(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


OWN = {name for tree in TREES.values() for name in attributes_of(tree)}


def changes_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of what changes an object that is no own one."""
    hosts = host_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("setattr", "delattr"):
                if not is_own(node.args[0]):
                    yield node.lineno, ast.unparse(node).split(",")[0] + ", …)"
            elif name.rpartition(".")[2] in CHANGING and (
                root_of(node.func) in hosts or root_of(node.func) == "layer"
            ):
                yield node.lineno, name
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(
            node.ctx, ast.Load
        ):
            place = node
            while isinstance(place, ast.Subscript):
                place = place.value
            if isinstance(place, ast.Name):
                is_foreign = place.id in hosts
            else:
                is_foreign = (
                    isinstance(place, ast.Attribute)
                    and not is_own(place.value)
                    and (place.attr not in OWN - LENT or root_of(place) in hosts)
                )
            if is_foreign and ast.unparse(place) not in NO_HOST:
                yield node.lineno, ast.unparse(place)


FOUND = [
    (f"{path.relative_to(PACKAGE)}:{line}", text)
    for path, tree in TREES.items()
    for line, text in changes_in(tree)
]


def rows_of(ledger: str) -> Iterator[tuple[str, ...]]:
    """What (as the sources write it), why, and until when."""
    table = ledger.split("<!-- changes -->")[1].split("<!-- /changes -->")[0]
    for line in table.strip().splitlines()[2:]:
        yield tuple(cell.strip() for cell in line.strip("|").split(" | "))


ROWS = list(rows_of(LEDGER))


def declared_in(rows: list[tuple[str, ...]]) -> list[str]:
    return [text for what, *_ in rows for text in re.findall("`(.+?)`", what)]


def undeclared(rows: list[tuple[str, ...]]) -> list[str]:
    return [f"{place}: {text}" for place, text in FOUND if text not in declared_in(rows)]


def test_every_change_to_a_host_is_declared_with_its_reason_and_its_end():
    assert undeclared(ROWS) == []
    assert all(len(row) == 3 and all(row) for row in ROWS)


def test_nothing_is_declared_that_is_not_done():
    done = {text for _, text in FOUND}
    assert [text for text in declared_in(ROWS) if text not in done] == []


@pytest.mark.parametrize("missing", ROWS, ids=lambda row: row[0])
def test_a_row_that_is_taken_out_is_missed(missing):
    assert undeclared([row for row in ROWS if row is not missing])
