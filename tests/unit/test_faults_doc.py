"""The table of faults in `docs/faults.md` is the suite's."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from support.faults.table import DOCUMENT, FAULTS, document


def test_the_table_of_faults_is_generated_from_the_suite():
    hint = "run `python -m support.faults` in tests"
    assert DOCUMENT.read_text() == document(), hint


def test_every_fault_says_what_the_client_is_told():
    """A refusal of this package has words of its own to look for; the host's may change."""
    silent = [fault.id for fault in FAULTS if fault.code == 400 and not (fault.told or fault.host)]
    assert all(fault.about for fault in FAULTS if fault.id in silent), silent
