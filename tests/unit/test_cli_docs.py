"""What the documents say is what the code does."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from sglang_fp8rl.compat import NEWEST_EXCLUDED, OLDEST, TESTED
from sglang_fp8rl.config import Options

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def hooks_table(hooks) -> str:
    lines = ["| target | kind | why | until |", "|---|---|---|---|"]
    for hook in hooks:
        target = hook.target.removeprefix("sglang.srt.")
        lines.append(f"| `{target}` | {hook.kind} | {hook.reason} | {hook.until} |")
    return "\n".join(lines)


@pytest.mark.parametrize("section", ["hooks", "verl-hooks", "cpu-hooks"])
def test_the_hooks_table_is_the_code_s(section):
    pytest.importorskip("sglang")
    if section == "hooks":
        from sglang_fp8rl.engine.host.hooks import HOOKS as hooks
    elif section == "verl-hooks":
        from sglang_fp8rl.verl_plugin import VERL_HOOKS as hooks
    else:
        from sglang_fp8rl.platforms.cpu_hooks import CPU_HOOKS as hooks
    found = re.search(f"<!-- {section} -->\n(.*?)\n?<!-- /{section} -->", ARCHITECTURE, re.DOTALL)
    assert found is not None
    expected = hooks_table(hooks)
    assert found.group(1).strip() == expected, f"write this into docs/architecture.md:\n{expected}"


@pytest.mark.parametrize("document", ["README.md", "docs/trainer.md"])
def test_every_test_named_in_a_document_exists(document):
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", (ROOT / document).read_text()))
    assert named
    assert {name for name in named if f"def {name}(" not in sources} == set()


def test_the_options_table_has_every_option_and_its_default():
    section = README.split("## Options")[1].split("\n## ")[0]
    table = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", section, re.MULTILINE))
    expected = {}
    for option in fields(Options):
        value = option.default
        expected[option.name] = (
            value if isinstance(value, str) else json.dumps(value if value != () else [])
        )
    assert table == expected


def test_the_versions_named_are_the_tested_ones():
    assert all(f"| {version} (" in README for version in TESTED)
    assert f">={OLDEST},<{NEWEST_EXCLUDED}" in README


def test_documents_name_no_local_path():
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        assert not re.search(r"/(work|home|root|tmp|mnt)/", path.read_text()), path
