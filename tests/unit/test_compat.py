"""Which SGLang is served with: releases count as themselves, builds before or between them as the release they lead to."""

from __future__ import annotations

import importlib.metadata

import pytest
from packaging.version import Version

from sglang_fp8rl import compat, verl_plugin
from sglang_fp8rl.compat import HOST_VERSION_VARIABLE, NEWEST_EXCLUDED, OLDEST
from sglang_fp8rl.lab import doctor


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(HOST_VERSION_VARIABLE, raising=False)


@pytest.fixture
def with_sglang(monkeypatch):
    """Has the metadata of SGLang, and of veRL, say this version; None: it is not installed."""

    def install(version: str | None) -> None:
        def found(package: str) -> str | None:
            if version is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return version

        monkeypatch.setattr(importlib.metadata, "version", found)

    return install


def host_lines() -> list[tuple[str, str]]:
    return [(state, text) for state, text in doctor._host()]


@pytest.mark.parametrize(
    ("version", "counts_as", "is_fine"),
    [
        ("0.5.16", "0.5.16", True),
        ("0.5.16rc1", "0.5.16", True),
        ("0.5.20.post1", "0.5.20", True),
        ("0.5.23+cu129", "0.5.23", True),
        ("0.5.23.dev20260801+g0123abc", "0.5.23", True),
        ("0.5.24rc1", "0.5.24", False),
        ("0.5.24.dev1", "0.5.24", False),
        ("0.5.24a0.dev3+gabc", "0.5.24", False),
        ("0.5.24", "0.5.24", False),
        ("0.5.15.post3", "0.5.15", False),
        ("0.0.0.dev1+g0123abc", "0.0.0", False),
    ],
)
def test_a_build_is_accepted_or_refused_like_its_release(with_sglang, version, counts_as, is_fine):
    with_sglang(version)
    assert compat.host_version() == Version(counts_as)
    problems = compat.check_host()
    assert (problems == []) == is_fine
    supported = f">={OLDEST},<{NEWEST_EXCLUDED}"
    assert all(version in text and supported in text for text in problems)


@pytest.mark.parametrize("version", ["0.7.1", "0.10", "0.10.0.dev0", "0.10rc1", "unknown"])
def test_a_verl_outside_the_range_is_named(with_sglang, version):
    with_sglang(version)
    (problem,) = verl_plugin.check_verl()
    assert version in problem
    assert verl_plugin.TESTED_VERL in problem
    with_sglang("0.9.1")
    assert verl_plugin.check_verl() == []


@pytest.mark.parametrize(
    "version", ["unknown", "", "main-0123abc", "0.0.0.dev1+g0123abc", "0.5.24rc1"]
)
def test_a_build_that_says_no_supported_release_can_be_told_which_it_is(
    with_sglang, monkeypatch, version
):
    with_sglang(version)
    (problem,) = compat.check_host()
    assert repr(version) in problem or version in problem.split()
    assert HOST_VERSION_VARIABLE in problem
    assert host_lines() == [(doctor.PROBLEM, problem)]
    monkeypatch.setenv(HOST_VERSION_VARIABLE, "0.5.23")
    assert compat.check_host() == []
    assert compat.host_version() == Version("0.5.23")
    ((state, text),) = host_lines()
    assert (state, version in text, HOST_VERSION_VARIABLE in text) == (doctor.NOTE, True, True)


@pytest.mark.parametrize("value", ["main", "0.5.23rc1", "0.5.23.dev1", "v", "0.5.23+cu129"])
def test_a_variable_that_names_no_release(with_sglang, monkeypatch, value):
    with_sglang("0.0.0.dev1+g0123abc")
    monkeypatch.setenv(HOST_VERSION_VARIABLE, value)
    (problem,) = compat.check_host()
    assert problem.startswith(f"{HOST_VERSION_VARIABLE}: {value!r}; ")
    assert host_lines() == [(doctor.PROBLEM, problem)]
    assert compat.host_version() is None


def test_a_variable_that_names_a_release_that_is_not_supported(with_sglang, monkeypatch):
    with_sglang("0.0.0.dev1+g0123abc")
    monkeypatch.setenv(HOST_VERSION_VARIABLE, "0.5.24")
    (problem,) = compat.check_host()
    assert HOST_VERSION_VARIABLE in problem
    assert f"(counts as 0.5.24 by {HOST_VERSION_VARIABLE}) is outside the range" in problem


@pytest.mark.parametrize("version", ["0.5.24", "0.5.23", "0.5.23.post1", "0.5.20+cu129"])
def test_a_release_counts_as_itself_whatever_the_variable_says(with_sglang, monkeypatch, version):
    with_sglang(version)
    monkeypatch.setenv(HOST_VERSION_VARIABLE, "0.5.21")
    (problem,) = compat.check_host()
    assert problem.startswith(f"{HOST_VERSION_VARIABLE}: '0.5.21'; ")
    assert version in problem
    assert compat.host_version() is None
    monkeypatch.setenv(HOST_VERSION_VARIABLE, str(Version(version).base_version))
    assert (compat.check_host() == []) == (version != "0.5.24")


def test_an_sglang_that_is_not_there(with_sglang, monkeypatch):
    with_sglang(None)
    monkeypatch.setenv(HOST_VERSION_VARIABLE, "0.5.23")
    assert compat.host_version() is None
    (problem,) = compat.check_host()
    assert "sglang is not installed" in problem
    assert HOST_VERSION_VARIABLE not in problem


def test_every_check_of_the_doctor_runs_with_packages_of_no_version(with_sglang):
    with_sglang("unknown")
    for check in (doctor._host, doctor._known_bad, doctor._symbols, doctor._plugin, doctor._casts):
        assert check()
