"""The census in `docs/models.md`: outcomes and short reasons; the results file has the rest."""

from __future__ import annotations

import re
from pathlib import Path

from .needs import needs
from .outcome import KINDS, Row, summary
from .reliance import ALL
from .results import FOLDER, described, read

_RUNS = ("replayed", "native")
_LONGEST = 130  # characters of a reason


def section() -> str:
    """Of every host that has results, the newest first."""
    files = sorted(FOLDER.glob("*.json"), reverse=True)
    return "\n".join(_of_host(path) for path in files)


def _of_host(path: Path) -> str:
    provenance, found = read(path)
    rows = list(found.values())
    origin = f"{described(provenance)} [Errors in full](../tools/census/results/{path.name})."
    lines = [f"### SGLang {path.stem}: {summary(rows)}", "", origin, ""]
    return "\n".join([*lines, *_outcomes(rows), *_reliance(rows), *_gaps(rows)])


def _outcomes(rows: list[Row]) -> list[str]:
    """Classes with the same outcome, proof and reason share a line."""
    lines = ["| outcome | proof | why | classes |", "|---|---|---|---|"]
    for kind in KINDS:
        alike: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            if row.kind == kind:
                alike.setdefault((_proof(row), _why(row)), []).append(row)
        for (proof, why), those in sorted(
            alike.items(), key=lambda one: (one[0][0] != "token", one[0])
        ):
            lines.append(f"| {kind} | {proof} | {escaped(why)} | {names_of(those)} |")
    return [*lines, ""]


def _proof(row: Row) -> str:
    """What was compared with a fresh model."""
    if row.is_proven:
        return "token"
    is_alike = row.kind in (*_RUNS, "not started") or (row.kind == "draft" and not row.reasons)
    return "bytes" if is_alike else ""


def _why(row: Row) -> str:
    """What keeps it from being replayed, and what kept a token from being compared."""
    if row.kind == "not built":
        return shortened(needs(row))  # it says nothing about serving
    if row.kind == "refused":
        return "; ".join(row.reasons)  # with what the user may do
    reasons = row.reasons if row.kind in _RUNS else row.reasons[:1]
    without_token = [_no_token(row.not_run)] if row.kind in _RUNS and row.not_run else []
    return "; ".join(dict.fromkeys([*map(shortened, reasons), *without_token]))


def _no_token(not_run: str) -> str:
    if not_run.startswith("needs a GPU"):
        return "its forward pass needs a GPU"
    if not_run.startswith("its outputs"):
        return not_run
    return "SGLang's own forward pass of it fails here"


def shortened(reason: str) -> str:
    """The first sentence, without the names of operations."""
    first = re.sub(r" \(aten[^)]*\)", "", reason.split(". ")[0])
    return cut(first, _LONGEST)


def cut(text: str, longest: int) -> str:
    """At most so many characters of it, in whole words."""
    return text if len(text) <= longest else f"{text[:longest].rsplit(' ', 1)[0]} …"


def _reliance(rows: list[Row]) -> list[str]:
    """What classes need beside copies of their loaders."""
    judged = [row for row in rows if row.kind in (*_RUNS, "not started")]
    lines = [f"Of the {len(judged)} classes whose updates were judged, so many rely on", ""]
    lines += ["| what | classes |", "|---|---|"]
    for what in ALL:
        those = [row for row in judged if what in row.relies_on]
        lines.append(f"| {what} | {len(those)}{': ' if those else ''}{names_of(those)} |")
    return [*lines, ""]


def _gaps(rows: list[Row]) -> list[str]:
    """What small models do not have, or do not load."""
    of_runs = [row for row in rows if row.kind in _RUNS]
    gaps = {
        "Their small model lacks a kind of layer": [row for row in of_runs if row.lost],
        "No name reached some of their parameters": [row for row in of_runs if row.unreached],
    }
    return [f"{what}: {names_of(those)}.\n" for what, those in gaps.items() if those]


def names_of(rows: list[Row]) -> str:
    return ", ".join(row.architecture for row in rows)


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
