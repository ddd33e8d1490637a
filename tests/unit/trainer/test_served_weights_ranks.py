"""FSDP2 on two ranks computes as one process does, and proves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from support.paths import SUPPORT, python_path

from sglang_fp8rl.lab.testing.ports import free_port


def test_two_ranks_of_fsdp2_train_and_prove_as_one_process():
    """FP32 shards, gathered in BF16; swapped before and after, with checkpointing and without."""
    script = SUPPORT / "trainer" / "served_ranks.py"
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": python_path(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][1] + said[1][1]
    assert json.loads(said[0][0].splitlines()[-1]) == "as one process"
