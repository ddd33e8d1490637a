"""`python contract_table.py`: put the results of contract and census into `docs/models.md`.

The contract's come from `pytest --all --contract-results FILE tests/engine/test_contract.py`, one file per
host, kept in `contract_results/`; the census's from `make census ARGS=--write`. Both know the commit and the
versions that they are from, and the page shows them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tools.census import families, page, results, two_ranks  # noqa: E402

DOCUMENT = ROOT / "docs" / "models.md"
RESULTS = ROOT / "tests" / "engine" / "contract_results"
NOT_RUN = "not run"

# Test to column. The first one only shows that the others prove something.
COLUMNS = {
    "test_refit_equals_fresh_load_again_and_again": "fresh = refit",
    "test_buckets_of_any_size_and_order_give_the_same_bytes": "buckets",
    "test_a_session_of_buckets_equals_one_call": "sessions",
    "test_update_from_disk_equals_fresh_load": "disk",
    "test_the_engine_and_the_trainer_quantize_to_the_same_bytes": "who quantizes",
    "test_bf16_and_fp16_sources_give_the_bytes_of_their_values": "16-bit sources",
    "test_nothing_of_the_old_bytes_is_left": "nothing old left",
    "test_addresses_stay": "addresses",
    "test_the_scheme_is_decided_once": "scheme",
    "test_quantized_offline_and_served_by_sglangs_own_fp8_gives_the_same_bytes": "SGLang's `fp8`",
    "test_a_refitted_engine_says_what_a_fresh_one_says": "generates",
}


class Recorder:
    """A pytest plugin that writes what became of every case."""

    def __init__(self, path: Path, host: str) -> None:
        self._path, self._host = path, host
        self._cases: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if "test_contract.py::" not in report.nodeid or not (
            report.when == "call" or report.outcome != "passed"
        ):
            return
        if report.when == "teardown":
            return
        # With workers, "@" and the group stand behind it.
        test, _, rest = report.nodeid.rpartition("::")[2].partition("[")
        case = rest.rpartition("]")[0]
        outcome = report.outcome
        if outcome == "skipped":
            outcome = report.longrepr[2].removeprefix("Skipped: ")
        self._cases.setdefault(case, {})[test] = outcome

    def pytest_sessionfinish(self) -> None:
        known: dict[str, Any] = {}
        if self._path.exists():  # a part of the suite renews its part of the results
            known = json.loads(self._path.read_text())
        origins = known.get("provenance", {}) | dict.fromkeys(self._cases, results.provenance())
        found = {
            "host": self._host,
            "provenance": dict(sorted(origins.items())),
            "cases": dict(sorted((known.get("cases", {}) | self._cases).items())),
        }
        self._path.write_text(json.dumps(found, indent=1) + "\n")


def table(hosts: list[dict[str, Any]], cases: list[str]) -> str:
    """One row per model and outcome, one column per host; the reasons for what is not there below."""
    reasons: dict[str, int] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    for case in cases:
        model, _, layout = case.rpartition("-")
        cells = [_cell(found["cases"].get(case, {}), reasons) for found in hosts]
        rows.setdefault((model, *cells), []).append(layout)
    lines = [f"{_origins(found)}\n" for found in hosts]
    lines += ["| model | layouts | " + " | ".join(found["host"] for found in hosts) + " |"]
    lines += ["|---|---|" + "---|" * len(hosts)]
    for (model, *cells), layouts in rows.items():
        lines.append(f"| {model} | {', '.join(layouts)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{number}. {text}" for text, number in reasons.items()), ""])


def _origins(found: dict[str, Any]) -> str:
    """Which cases are from which run."""
    runs: dict[str, list[str]] = {}
    for case in found["cases"]:
        origin = results.described(found["provenance"][case])
        runs.setdefault(origin, []).append(case)
    if len(runs) == 1:
        return next(iter(runs))
    return " ".join(f"{', '.join(cases)}: {origin}" for origin, cases in runs.items())


def _cell(outcomes: dict[str, str], reasons: dict[str, int]) -> str:
    """The columns of one case that did not pass, each with the number of its reason."""
    told = {column: outcomes.get(test, NOT_RUN) for test, column in COLUMNS.items()}
    missing = {
        column: outcome
        if outcome == NOT_RUN
        else f"({reasons.setdefault(outcome, len(reasons) + 1)})"
        for column, outcome in told.items()
        if outcome != "passed"
    }
    if not missing:
        return "all"
    if len(missing) == len(COLUMNS) and len(set(missing.values())) == 1:
        why = missing.popitem()[1]
        return why if why == NOT_RUN else f"none {why}"
    return "all but " + ", ".join(f"{column} {why}" for column, why in missing.items())


def contract_cases() -> list[str]:
    """The suite's cases, in its order."""
    from support.engine.contract import CASES, case_id

    return [case_id(case) for case in CASES]


def document() -> str:
    """`docs/models.md` as it has to be."""
    files = sorted(RESULTS.glob("*.json"), reverse=True)
    shown = table([json.loads(path.read_text()) for path in files], contract_cases())
    text = _replaced(DOCUMENT.read_text(), "contract", shown)
    text = _replaced(text, "families", families.section())
    text = _replaced(text, "two-ranks", two_ranks.section())
    return _replaced(text, "census", page.section())


def _replaced(text: str, part: str, content: str) -> str:
    begin, end = f"<!-- {part} -->", f"<!-- /{part} -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{content}{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
