"""What the sources name of SGLang is in the installed one."""

from __future__ import annotations

import ast
import json

import pytest

from sglang_fp8rl.compat import NEWEST_EXCLUDED, OLDEST, host_version
from sglang_fp8rl.declared_hooks import find
from sglang_fp8rl.lab import host_symbols
from sglang_fp8rl.lab.host_symbols import PACKAGE, SINCE

SYMBOLS = host_symbols.used_symbols()


def test_imports_attributes_and_texts_are_read_off_the_sources():
    assert {
        "sglang.srt.layers.quantization.fp8.Fp8Config",  # imported
        "sglang.srt.managers.io_struct.BeginWeightUpdateReqOutput",  # an attribute
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",  # a text
    } <= SYMBOLS
    assert not any(path.startswith("sglang_fp8rl") for path in SYMBOLS)


def test_targets_of_hooks_are_read_off_the_sources():
    pytest.importorskip("sglang")
    from sglang_fp8rl.engine.host.hooks import HOOKS
    from sglang_fp8rl.lab.cpu_platform.cpu_hooks import CPU_HOOKS

    targets = {hook.target for hook in (*HOOKS, *CPU_HOOKS)}
    assert {target for target in targets if target.startswith("sglang.")} <= SYMBOLS


def test_what_only_some_versions_have_is_used_and_in_the_supported_range():
    assert set(SINCE) <= SYMBOLS
    assert all(OLDEST < since < NEWEST_EXCLUDED for since in SINCE.values())


def look(more: list[str]) -> None:
    """In a process of its own."""
    late = [path for path, since in SINCE.items() if host_version() < since]
    early = [path for path in late if find(path) is not None]
    host_symbols.used_symbols = lambda: SYMBOLS | set(more)
    print(json.dumps([host_symbols.check_symbols(), early]))


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory) -> list[list[str]]:
    """What a process on the CPU platform finds in the installed SGLang, asked for one thing too many."""
    pytest.importorskip("sglang")
    from support.engine.forked import run_forked

    log = tmp_path_factory.mktemp("symbols") / "log"
    more = ["sglang.srt.server_args.no_such_thing"]
    assert run_forked(look, (more,), log) == "exit status 0", log.read_text()
    return json.loads(log.read_text().splitlines()[-1])


def test_the_installed_sglang_has_every_symbol_and_says_what_it_has_not(on_the_host):
    assert on_the_host[0] == ["sglang.srt.server_args.no_such_thing: not in this SGLang"]


def test_what_is_said_to_be_of_later_versions_is_not_in_this_one(on_the_host):
    assert on_the_host[1] == []


def test_imports_inside_the_package_are_relative():
    absolute = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang_fp8rl"))
        or (isinstance(node, ast.Import) and node.names[0].name.startswith("sglang_fp8rl"))
    ]
    assert absolute == []
