"""Environments are installed by exact versions, one for each SGLang that is tested."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from sglang_fp8rl.compat import TESTED

FOLDER = Path(__file__).parents[2] / "constraints"
_LISTS = ("requirements", "trainer", "overrides")  # without versions, or for all of them
TRAINERS = sorted(FOLDER.glob("torch-*.txt"))
SERVERS = [one for one in FOLDER.glob("*.txt") if one.stem not in _LISTS and one not in TRAINERS]
_PIN = re.compile(r"^(?P<package>[a-z0-9][a-z0-9._-]*)==(?P<version>[\w.+]+)$")


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    found = [_PIN.match(line) for line in lines]
    assert all(found), [line for line, one in zip(lines, found, strict=True) if not one]
    return {one["package"]: one["version"] for one in found if one}


def test_each_tested_sglang_has_exact_versions_of_all_packages_and_an_environment_of_its_name():
    of = {path.stem: pins(path)["sglang"] for path in SERVERS}
    assert sorted(of.values()) == sorted(TESTED)
    assert all(version == name for name, version in of.items() if name[0].isdigit())
    assert (of["oldest"], of["newest"]) == (TESTED[0], TESTED[-1])


def test_what_is_overridden_is_what_every_environment_has():
    overrides = pins(FOLDER / "overrides.txt").items()
    for path in SERVERS:
        assert overrides <= pins(path).items(), path.name


def test_a_trainer_s_environments_are_of_the_torch_in_their_names_the_oldest_allowed_among_them():
    versions = {path: Version(path.stem.removeprefix("torch-")) for path in TRAINERS}
    assert versions == {path: Version(pins(path)["torch"]) for path in TRAINERS}
    text = (FOLDER.parent / "pyproject.toml").read_text()
    allowed = re.search(r'"(torch>=[\d.]+)"', text)
    assert allowed is not None
    oldest = min(versions.values())
    assert oldest in Requirement(allowed[1]).specifier
    assert f"torch>={oldest.major}.{oldest.minor}" == allowed[1]
    assert not any("sglang" in pins(path) for path in TRAINERS)
