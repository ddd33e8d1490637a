"""Fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def printed_by(code: str, *arguments: str, **env: str) -> str:
    """What a fresh interpreter prints while it runs the code; it has to end well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
