"""A session on a GPU is fine where all of its parts ran."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("triton")

from gpu_session import all_are_ok
from rich.console import Console


def test_a_part_that_was_not_started_is_not_ok():
    said = io.StringIO()
    assert not all_are_ok("laws", 0.0, Console(file=said))
    assert "not started" in said.getvalue()
