"""The files that one update passes, from SGLang's hook to the first byte that is stored.

They are listed in `docs/architecture.md`: who reads them in that order has read the way of an update.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.engine.commands import update
from support.engine.pool import on

from sglang_fp8rl.versions import HAS_SESSIONS

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
# It may only get shorter.
MOST = {"Natively": 28, "Replayed": 16}
_WRITES = "numerics/cpu/table.py"


def files_to_the_first_byte(scheduler: Any, *arguments: Any) -> list[str]:
    """Files of the package that an update enters, in order, up to the one that casts; its answer is asserted."""
    found: dict[str, None] = {}

    def see(frame: Any, event: str, _: Any) -> None:
        _, is_ours, path = frame.f_code.co_filename.rpartition("sglang_fp8rl/")
        is_code = event == "call" and frame.f_code.co_name != "<module>"
        is_on_the_way = found or path.endswith("host/updater.py")
        if not (is_ours and is_code and is_on_the_way) or path.startswith("lab/"):
            return
        found[path] = None
        if path == _WRITES:
            sys.setprofile(None)

    sys.setprofile(see)
    try:
        answer = update(scheduler, *arguments)
    finally:
        sys.setprofile(None)
    assert answer[0], answer
    return list(found)


def listed(heading: str) -> list[str]:
    """One list of "The way of one update"."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("## The way of one update\n")[2].partition("\n## ")[0]
    lines = section.partition(f"**{heading}**")[2].partition("\n\n**")[0].splitlines()
    return [found[1] for line in lines if (found := re.match(r"\d+\. `([^`]+\.py)`", line))]


@pytest.mark.skipif(not HAS_SESSIONS, reason="the lists are of an SGLang that has sessions")
@on("qwen3-tp1")
def test_the_files_are_those_that_are_listed(host):
    weight = next(name for name in host.model.second if name.endswith("k_proj.weight"))
    sent = [(weight, host.model.second[weight].float())]
    found = {}
    for kind in MOST:  # each behind a complete one, as in training: nothing is given up
        assert host.call(update, list(host.model.first.items()))[0]
        found[kind] = host.call(files_to_the_first_byte, sent, "flattened_bucket")
    assert found == {kind: listed(kind) for kind in MOST}
    for kind, files in found.items():
        assert len(files) <= MOST[kind], kind
