"""veRL's own FSDP engine builds an actor that trains what is served, and nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from verl_trainer.names import CPU_PLATFORM

from sglang_fp8rl.lab.testing.ports import free_port

pytest.importorskip("verl")

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_verl_s_actor_computes_as_served_and_its_reference_does_not(tmp_path):
    script = Path(__file__).with_name("verl_actor.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(
                [str(script.parents[1]), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
            ),
            **CPU_PLATFORM,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": "1",
            "RANK": "0",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == "the actor alone"
