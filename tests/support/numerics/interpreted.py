"""Run a function in a process of Triton's interpreter: that is chosen before Triton is imported."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from support.paths import python_path

_CODE = """
import importlib, sys, torch
module, function, given, found = sys.argv[1:]
run = getattr(importlib.import_module(module), function)
torch.save(run(torch.load(given, weights_only=False)), found)
"""


def interpreted(run: Callable[[Any], Any], jobs: Any, folder: Path, *, timeout: int = 300) -> Any:
    """What `run`, a function of a module, makes of the jobs; both are files of `torch.save`."""
    given, found = folder / "jobs.pt", folder / "results.pt"
    torch.save(jobs, given)
    place = Path(inspect.getfile(run)).parent
    done = subprocess.run(
        [sys.executable, "-c", _CODE, run.__module__, run.__name__, str(given), str(found)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": python_path(place)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(found)
