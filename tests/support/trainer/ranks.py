"""Ranks of a trainer in processes of their own, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from sglang_fp8rl.lab.testing.ports import free_port
from support.paths import BENCHMARKS, SUPPORT, python_path


def said_by_ranks(script: str, *arguments: str, size: int, **env: str) -> Any:
    """Run a script beside this on so many ranks, as torchrun would; the JSON that rank 0 prints last."""
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": python_path(BENCHMARKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        **env,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SUPPORT / "trainer" / script), *arguments],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, [errors[-4000:] for _, errors in said]
    return json.loads(said[0][0].splitlines()[-1])
