"""Where all packages are required, one that is missing fails what needs it, a whole file or one test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MISSING = 'pytest.importorskip("no_such_package")'
FILES = {
    "file": f"import pytest\n{MISSING}\ndef test_a(): pass\n",
    "test": f"import pytest\ndef test_a(): {MISSING}\ndef test_b(): pass\n",
    "expected failure": "import pytest\n@pytest.mark.xfail\ndef test_a(): assert 0\n",
    "optional": "import pytest\ndef test_a(): pytest.importorskip('no_such_package', reason='optional')\n",
}


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("is_required", [False, True], ids=["skipped", "required"])
def test_a_missing_package(tmp_path, what, is_required):
    (tmp_path / "test_it.py").write_text(FILES[what])
    options = ["-p", "missing_packages", "-q", *(["--all-packages"] if is_required else [])]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    fails = is_required and what in ("file", "test")
    expected = [int(fails)] if what != "file" else [2] if fails else [5]  # 5: nothing was collected
    assert [result.returncode] == expected, result.stdout
    assert ("could not import 'no_such_package'" in result.stdout) == fails
