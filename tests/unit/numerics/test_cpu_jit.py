"""Numba asks whether a kernel's own file changed, but a kernel takes in functions and constants of other files."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
from support.python import printed_by

import sglang_fp8rl


def test_a_kernel_is_compiled_anew_when_another_file_changed(tmp_path):
    pytest.importorskip("numba")
    without = shutil.ignore_patterns("__pycache__")
    package = tmp_path / "sglang_fp8rl"
    shutil.copytree(Path(sglang_fp8rl.__file__).parent, package, ignore=without)
    code = """
        import sys
        import torch
        sys.path.insert(0, sys.argv[1])
        from sglang_fp8rl.numerics import fingerprint
        print(fingerprint.__file__, fingerprint.tensor_number(-torch.ones(2, 2), 1))
    """
    run = functools.partial(
        printed_by, code, str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path / "cache")
    )
    before = run()
    assert before.startswith(str(package))
    compiled = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}
    assert run() == before
    assert compiled == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}

    kernels = package / "numerics/cpu/kernels.py"
    as_it_was = kernels.read_text()
    # What the kernel in `fingerprint.py` reads as words.
    kernels.write_text(as_it_was.replace("np.uint32(0), np.uint16(0)", "np.uint32(0), np.int16(0)"))
    assert kernels.read_text() != as_it_was
    assert run() != before
