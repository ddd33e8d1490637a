"""The plan of a model's server, from the command that users call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def plan_text(model: Path, tp_size: int = 1) -> str:
    """What `sglang-fp8rl plan --json` says of a server with the default options."""
    command = [sys.executable, "-c", "from sglang_fp8rl.cli import app; app()", "plan"]
    command += [str(model), f"--tp={tp_size}", "--json"]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
