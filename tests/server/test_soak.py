"""The short version of `make soak`: nothing grows, no answer is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.server.served import run_script

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def test_fifty_refits_under_load_and_with_faults_leave_nothing_behind(tmp_path):
    found, picture = tmp_path / "soak.json", tmp_path / "soak.png"
    args = ["--refits", "50", "--json", str(found), "--plot", str(picture)]
    result = run_script([str(SOAK), *args])
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    counts = json.loads(found.read_text())["counts"]
    assert (counts["refits"], counts["lost answers"]) == (50, 0)
    assert counts["faults"] == 10
    assert picture.stat().st_size > 10_000
