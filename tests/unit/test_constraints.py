"""Environments are installed by exact versions, one for each SGLang that is tested."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_fp8rl.compat import TESTED

FOLDER = Path(__file__).parents[2] / "constraints"
_PIN = re.compile(r"^(?P<package>[a-z0-9][a-z0-9._-]*)==(?P<version>[\w.+]+)$")


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    found = [_PIN.match(line) for line in lines]
    assert all(found), [line for line, one in zip(lines, found, strict=True) if not one]
    return {one["package"]: one["version"] for one in found if one}


def test_each_tested_sglang_has_exact_versions_of_all_packages_and_an_environment_of_its_name():
    files = [
        path for path in FOLDER.glob("*.txt") if path.stem not in ("requirements", "overrides")
    ]
    of = {path.stem: pins(path)["sglang"] for path in files}
    assert sorted(of.values()) == sorted(TESTED)
    assert all(version == name for name, version in of.items() if name[0].isdigit())
    assert (of["oldest"], of["newest"]) == (TESTED[0], TESTED[-1])


def test_what_is_overridden_is_what_every_environment_has():
    overrides = pins(FOLDER / "overrides.txt").items()
    for path in FOLDER.glob("*.txt"):
        if path.stem != "requirements":
            assert overrides <= pins(path).items(), path.name
