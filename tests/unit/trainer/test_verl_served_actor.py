"""veRL's own FSDP engine builds an actor that trains what is served, and nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.paths import BENCHMARKS, SUPPORT, python_path
from verl_trainer.names import CPU_PLATFORM

from sglang_fp8rl.lab.testing.ports import free_port

pytest.importorskip("verl")


def test_verl_s_actor_computes_as_served_and_its_reference_does_not(tmp_path):
    script = SUPPORT / "trainer" / "verl_actor.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": python_path(BENCHMARKS),
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
