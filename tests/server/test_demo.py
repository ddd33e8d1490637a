"""The demo, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_fp8rl.lab.testing.checkpoints import make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

COMMAND = [sys.executable, "-c", "from sglang_fp8rl.lab.cli import app; app()", "demo", "--json"]


def demo(directory: Path, *args: str) -> dict:
    env = {**os.environ, "TMPDIR": str(directory)}
    done = subprocess.run([*COMMAND, *args], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_demo_runs_through_and_every_output_is_equal(tmp_path):
    report = demo(tmp_path)
    assert report["ok"]
    assert len(report["checks"]) == 3
    assert report["outputs_compared"] > 0
    assert set(report["schemes"]) == {"blockwise", "per_channel"}
    assert report["fp8_bytes"] * 2 == report["bf16_bytes_replaced"]
    for refit in report["refits"]:
        assert refit["buckets"] > 1
        assert 0 < refit["engine_seconds"] <= refit["http_seconds"]
    assert not Path(report["directory"]).exists()


@pytest.mark.slow
def test_the_demo_runs_on_a_checkpoint_of_the_user_s(tmp_path):
    import torch

    path = make_checkpoint(tmp_path / "own", "llama", dtype=torch.bfloat16)
    report = demo(tmp_path, "--model", str(path), "--keep")
    assert report["ok"]
    assert report["model"] == str(path)
    assert Path(report["directory"], "refitted-server.log").exists()
