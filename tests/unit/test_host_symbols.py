"""The list of host symbols is what the sources use, and what the installed SGLang has."""

from __future__ import annotations

import ast
import json
from collections import Counter

import pytest
from host_uses import PACKAGE, uses_of_the_host

from sglang_fp8rl.compat import NEWEST_EXCLUDED, OLDEST
from sglang_fp8rl.host_symbols import SYMBOLS

LISTED = {symbol.path for symbol in SYMBOLS}
MODULES = {symbol.path for symbol in SYMBOLS if symbol.kind == "module"} | {
    symbol.module for symbol in SYMBOLS
}
USES = uses_of_the_host()


def hook_targets() -> set[str]:
    pytest.importorskip("sglang")
    from sglang_fp8rl.engine.host.hooks import HOOKS
    from sglang_fp8rl.platforms.cpu_hooks import CPU_HOOKS
    from sglang_fp8rl.verl_rollout.hooks import VERL_HOOKS

    targets = {hook.target for hook in (*HOOKS, *CPU_HOOKS, *VERL_HOOKS)}
    return {target for target in targets if target.startswith("sglang.")}


def test_every_import_and_every_path_in_the_sources_is_listed():
    owners = {path.rpartition(".")[0] for path in LISTED}  # modules, and classes by their methods
    unlisted = USES.symbols - LISTED - owners
    # What a listed class or value has of its own (`HookType.AROUND`) need not be listed.
    values = (LISTED | owners) - MODULES
    assert {path for path in unlisted if path.rpartition(".")[0] not in values} == set()


def test_every_hook_target_is_listed():
    assert hook_targets() - LISTED == set()


def test_everything_listed_is_used():
    used = USES.symbols | USES.overridden | hook_targets()
    files = "".join(
        path.read_text() for path in PACKAGE.rglob("*.py") if "symbols" not in path.name
    )

    def is_looked_up(symbol) -> bool:
        """By `getattr` with a name from a table, by `hasattr`, or on `sys.modules[module]`."""
        is_reachable = symbol.module in used
        return is_reachable and (symbol.name in USES.texts or f".{symbol.name}" in files)

    methods = {
        symbol.path
        for symbol in SYMBOLS
        if "." in symbol.name and f".{symbol.name.split('.')[1]}(" in files
    }
    unused = [
        symbol.path
        for symbol in SYMBOLS
        if symbol.path not in used | methods and not is_looked_up(symbol)
    ]
    assert unused == []


def test_nothing_is_listed_twice_and_every_span_is_inside_the_supported_range():
    assert [path for path, count in Counter(s.path for s in SYMBOLS).items() if count > 1] == []
    for symbol in SYMBOLS:
        for end in (symbol.since, symbol.until):
            assert end is None or OLDEST < end < NEWEST_EXCLUDED, symbol


def look(overridden: list[str]) -> None:
    """In a process of its own."""
    from sglang_fp8rl.compat import host_version
    from sglang_fp8rl.host_symbols import check_symbols, find

    version = host_version()
    early = [s.path for s in SYMBOLS if not s.is_in(version) and find(s.path) is not None]
    print(json.dumps([check_symbols(), early, [one for one in overridden if find(one)]]))


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory) -> list[list[str]]:
    """What a process on the CPU platform finds in the installed SGLang."""
    pytest.importorskip("sglang")
    from forked import run_forked

    log = tmp_path_factory.mktemp("symbols") / "log"
    assert run_forked(look, (sorted(USES.overridden),), log) == "exit status 0", log.read_text()
    return json.loads(log.read_text().splitlines()[-1])


def test_the_installed_sglang_has_every_symbol_and_of_its_kind(on_the_host):
    assert on_the_host[0] == []


def test_what_is_listed_for_other_versions_is_not_in_this_one(on_the_host):
    assert on_the_host[1] == []


def test_every_method_that_we_override_is_listed(on_the_host):
    assert set(on_the_host[2]) - LISTED == set()


def test_imports_inside_the_package_are_relative():
    absolute = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang_fp8rl"))
        or (isinstance(node, ast.Import) and node.names[0].name.startswith("sglang_fp8rl"))
    ]
    assert absolute == []
