"""The counted machine code is held to the limits that the pages name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

import bench_sass

RESULTS = Path(bench_sass.__file__).parent / "results" / "sass.jsonl"


def test_what_hopper_spills_is_above_the_limits():
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    kernels = [row for row in rows if row["benchmark"] == "sass"]
    products = [row for row in rows if row["benchmark"] == "sass_linear"]
    assert bench_sass.above_limits(kernels, products) == []
    held = next(row for row in kernels if row["sm"] == 90 and row["limit"])
    assert bench_sass.above_limits([held | {"spilled_bytes": 16}], []) == [held["case"]]
