"""Run one of the scripts beside this in a process of Triton's interpreter: that is chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from support.paths import python_path


def interpreted(script: ModuleType, jobs: Any, folder: Path, *, timeout: int = 300) -> Any:
    """What the script makes of the jobs; both are files of `torch.save`."""
    given, found = folder / "jobs.pt", folder / "results.pt"
    torch.save(jobs, given)
    done = subprocess.run(
        [sys.executable, str(script.__file__), str(given), str(found)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(found)
