"""What the package has beside its sources is installed with them."""

from __future__ import annotations

from pathlib import Path

from setuptools import Distribution

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sglang_fp8rl"


def test_every_data_file_is_in_the_wheel(monkeypatch):
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files()
    patterns = distribution.package_data[PACKAGE.name]
    beside = {
        path
        for path in PACKAGE.rglob("*.*")
        if path.suffix != ".py" and path.parent.name != "__pycache__"
    }
    assert len(beside) > 1
    assert beside == {path for pattern in patterns for path in PACKAGE.glob(pattern)}
