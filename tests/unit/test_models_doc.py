"""`docs/models.md` is what the contract suite's results say, for exactly the suite's cases."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("sglang")

from support.engine import contract_table

from sglang_fp8rl.compat import TESTED

NEWEST = TESTED[-1]


def test_the_document_is_generated_from_the_results():
    expected = contract_table.document()
    assert contract_table.DOCUMENT.read_text() == expected, (
        "run `python tests/support/engine/contract_table.py`"
    )


@pytest.mark.parametrize(
    "path", sorted(contract_table.RESULTS.glob("*.json")), ids=lambda path: path.stem
)
def test_results_are_of_the_suite_s_cases_and_nothing_failed(path):
    """On the newest SGLang of all of them; elsewhere the table says what was not run."""
    results = json.loads(path.read_text())
    assert set(results["cases"]) <= set(contract_table.contract_cases())
    if path.stem == NEWEST:
        assert set(results["cases"]) == set(contract_table.contract_cases())
    outcomes = [text for case in results["cases"].values() for text in case.values()]
    assert "passed" in outcomes
    assert "failed" not in outcomes


def test_every_law_of_the_suite_has_a_column():
    source = (contract_table.RESULTS.parent / "test_contract.py").read_text()
    tests = {line[4:].partition("(")[0] for line in source.splitlines() if line[:9] == "def test_"}
    assert tests - set(contract_table.COLUMNS) == {
        "test_the_two_weight_sets_differ_in_every_weight"
    }
    assert set(contract_table.COLUMNS) <= tests


def test_the_page_explains_every_column():
    text = contract_table.DOCUMENT.read_text()
    assert [name for name in contract_table.COLUMNS.values() if f"\n| {name} | " not in text] == []


def test_a_cell_names_every_column_that_did_not_pass(monkeypatch):
    monkeypatch.setattr(contract_table, "COLUMNS", {"test_a": "a", "test_b": "b"})
    origin = dict.fromkeys(("commit", "date", "sglang", "torch", "transformers"), "1")
    outcomes = {
        "m-tp1": {"test_a": "passed", "test_b": "passed"},
        "m-tp2": {"test_a": "passed", "test_b": "passed"},
        "n-tp1": {"test_a": "passed", "test_b": "no GPU"},
        "n-tp2": {"test_a": "too old", "test_b": "too old"},
        "o-tp1": {"test_a": "passed"},
    }
    found = {"host": "9", "provenance": dict.fromkeys(outcomes, origin), "cases": outcomes}
    text = contract_table.table([found], [*outcomes, "o-tp2"])
    assert [line for line in text.splitlines() if line[:4] in ("| m ", "| n ", "| o ")] == [
        "| m | tp1, tp2 | all |",
        "| n | tp1 | all but b (1) |",
        "| n | tp2 | none (2) |",
        "| o | tp1 | all but b not run |",
        "| o | tp2 | not run |",
    ]
    assert "1. no GPU\n2. too old\n" in text
