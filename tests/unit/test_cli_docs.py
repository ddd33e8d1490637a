"""What the documents say is what the code does."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_fp8rl.compat import NEWEST_EXCLUDED, OLDEST, TESTED
from sglang_fp8rl.config import Options

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
HOST = (ROOT / "docs" / "host.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
)


def hooks_table(hooks) -> str:
    """Neighbours with one reason share a row."""
    lines = ["target, kind | why | until", "---|---|---"]
    for (kind, *said), alike in groupby(hooks, lambda hook: (hook.kind, hook.reason, hook.until)):
        targets = [f"`{hook.target.removeprefix('sglang.srt.')}`" for hook in alike]
        lines.append(" | ".join([f"{', '.join(targets)} {kind}", *said]))
    return "\n".join(lines)


@pytest.mark.parametrize("section", ["hooks", "cpu-hooks"])
def test_the_hooks_table_is_the_code_s(section):
    pytest.importorskip("sglang")
    if section == "hooks":
        from sglang_fp8rl.engine.host.hooks import HOOKS as hooks
    else:
        from sglang_fp8rl.lab.cpu_platform.cpu_hooks import CPU_HOOKS as hooks
    found = re.search(f"<!-- {section} -->\n(.*?)\n?<!-- /{section} -->", HOST, re.DOTALL)
    assert found is not None
    expected = hooks_table(hooks)
    assert found.group(1).strip() == expected, f"write this into docs/host.md:\n{expected}"


@pytest.mark.parametrize(
    "document",
    [
        *("docs/reference.md", "docs/trainer.md", "docs/models.md", "docs/recipes/README.md"),
        "benchmarks/README.md",
    ],
)
def test_every_test_named_in_a_document_exists(document):
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", (ROOT / document).read_text()))
    assert named
    assert {name for name in named if f"def {name}(" not in sources} == set()


def section(title: str) -> str:
    return REFERENCE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_options_table_has_every_option_and_its_default():
    table = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", section("Options"), re.MULTILINE))
    expected = {}
    for name, option in Options.model_fields.items():
        value = option.default
        expected[name] = (
            value if isinstance(value, str) else json.dumps(value if value != () else [])
        )
    assert table == expected


class OneWeight(torch.nn.Module):
    """A model with one parameter, which it loads as SGLang's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.weight.weight_loader(self.weight, tensor)  # type: ignore[operator]


def test_the_status_table_has_every_field_of_a_server_s_status():
    pytest.importorskip("sglang")
    from sglang_fp8rl.engine.host.status import status_of_replicas, status_section
    from sglang_fp8rl.engine.refit import ModelRefit

    model = OneWeight()
    refit = ModelRefit(model, Options(), {}, list)
    refit.attach()
    model.load_weights([("weight", torch.ones(4))])
    status = status_of_replicas([status_section(refit)])
    assert status["last_refit"]["tensors"] == 1
    found = set()
    for key, value in status.items():
        is_group = key in ("last_refit", "replay")
        found |= {f"{key}.{inner}" for inner in value} if is_group else {key}
    assert set(re.findall(r"^\| `([\w.]+)` \|", section("Status"), re.MULTILINE)) == found


def test_the_versions_named_are_the_tested_ones():
    assert all(f"| {version} (" in README for version in TESTED)
    assert f">={OLDEST},<{NEWEST_EXCLUDED}" in README


def test_documents_name_no_local_path():
    for path in PAGES:
        assert not re.search(r"/(work|home|root|tmp|mnt)/", path.read_text()), path


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_names_exists(page):
    """Relative links, and code by its path in the package or in the repository."""
    text = page.read_text()
    links = {page.parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text)}
    assert {str(link) for link in links if not link.exists()} == set()
    named = set(re.findall(r"`((?:engine|numerics|wire|platforms|trainer)/[\w/]+\.py)`", text))
    assert {name for name in named if not (ROOT / "sglang_fp8rl" / name).exists()} == set()


def test_every_file_of_the_ten_changes_exists():
    changes = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Ten changes")[2]
    lines = re.findall(r"^\d+\. (.+)$", changes, re.MULTILINE)
    named = [re.findall(r"`([\w/.]+\.(?:py|md|toml|txt)|Makefile)`", line) for line in lines]
    assert len(named) == 10
    assert all(named)
    places = (ROOT, ROOT / "sglang_fp8rl")
    missing = [
        one for names in named for one in names if not any((at / one).exists() for at in places)
    ]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_heading_that_a_document_links_exists(page):
    links = re.findall(r"\]\(([^)#:]*)#([\w-]+)\)", page.read_text())
    missing = [
        f"{link}#{anchor}"
        for link, anchor in links
        if anchor not in anchors(page.parent / link if link else page)
    ]
    assert missing == []
