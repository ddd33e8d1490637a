"""Whichever folder beside serving is deleted, with its line of registration, the rest serves and refits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.engine import small_contract
from support.paths import python_path

import sglang_fp8rl
from sglang_fp8rl.engine import extension

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PACKAGE = Path(sglang_fp8rl.__path__[0])
FOLDERS = [path.split(".")[0] for path in extension._EXTENSIONS]


def without(folder: str, copies: Path) -> Path:
    """A copy of the package that lacks the folder and its line."""
    copy = copies / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(copy / "engine" / folder)
    lines = (copy / "engine" / "extension.py").read_text().splitlines(keepends=True)
    left = [line for line in lines if f'"{folder}.' not in line]
    assert len(left) == len(lines) - 1
    (copy / "engine" / "extension.py").write_text("".join(left))
    return copy


def test_there_is_something_to_delete():
    assert FOLDERS == ["law", "replay", "plan", "proof", "kv_scales"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_server_without_the_folder_serves_and_refits(folder, tmp_path):
    copy = without(folder, tmp_path)
    answer = subprocess.run(
        [sys.executable, small_contract.__file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": python_path(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    others = [path for path in extension._EXTENSIONS if not path.startswith(f"{folder}.")]
    assert json.loads(answer.stdout.splitlines()[-1]) == {
        "package": str(copy),
        "extensions": [f"sglang_fp8rl.engine.{path.split(':')[0]}" for path in others],
        "differs_before": True,
        "same_bytes": True,
        "same_words": True,
        "replayed": None if folder == "replay" else 2,
        "state": None if folder == "law" else "whole",
        "has_kv_section": folder != "kv_scales",
    }
