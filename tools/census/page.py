"""The census in `docs/models.md`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .outcome import KINDS, Row, summary
from .reliance import ALL
from .results import FOLDER, described

_TITLES = {
    "replayed": "An update is written from its recipe, and leaves the bytes of a fresh load",
    "native": "The same bytes; an update goes through SGLang's loaders every time",
    "draft": "SGLang serves it beside its target in high precision, and its own loaders update it",
    "broken": "It starts, and its forward pass fails where SGLang's own model runs",
    "refused": "The server does not start, or the update fails, and says why",
    "not started": "Its bytes are those of a fresh load, but SGLang's start failed on this CPU",
    "not built": "Nothing is known: no small model of it could be loaded here",
}
_RUNS = ("replayed", "native")


def section() -> str:
    """Of every host that has results, the newest first."""
    files = sorted(FOLDER.glob("*.json"), reverse=True)
    return "\n".join(_of_host(path) for path in files)


def _of_host(path: Path) -> str:
    found = json.loads(path.read_text())
    rows = [Row(**one) for one in found["rows"]]
    lines = [f"### SGLang {path.stem}: {summary(rows)}", "", described(found["provenance"]), ""]
    for kind in KINDS:
        those = [row for row in rows if row.kind == kind]
        if those:
            lines += [f"**{kind}** ({len(those)}). {_TITLES[kind]}.", ""]
            lines += _told(kind, those)
    return "\n".join([*lines, *_reliance(rows), *_gaps(rows)])


def _told(kind: str, rows: list[Row]) -> list[str]:
    proven = [row for row in rows if row.is_proven or kind == "draft"]
    lines = []
    if kind in ("replayed", "draft") and proven:
        word = "A token of each is a fresh model's: " if kind == "replayed" else ""
        lines += [word + ", ".join(map(_counted, proven)) + ".", ""]
    elif proven:
        lines += [*_table(proven, _why), ""]
    others = [row for row in rows if row not in proven]
    if kind in _RUNS and others:
        lines += ["By bytes alone, as no token of it was made here:", ""]
    if others:
        lines += [*_table(others, _why_not_run if kind == "replayed" else _why), ""]
    return lines


def _why(row: Row) -> str:
    return "; ".join([*row.reasons, *([row.not_run] if row.kind in _RUNS and row.not_run else [])])


def _why_not_run(row: Row) -> str:
    return row.not_run


def _table(rows: list[Row], why: Callable[[Row], str]) -> list[str]:
    """Classes with the same reason share a line."""
    alike: dict[str, list[Row]] = {}
    for row in rows:
        alike.setdefault(why(row), []).append(row)
    lines = ["| classes | why |", "|---|---|"]
    for reason, those in alike.items():
        lines.append(f"| {', '.join(map(_counted, those))} | {_escaped(reason)} |")
    return lines


def _reliance(rows: list[Row]) -> list[str]:
    """What classes need beside copies of their loaders."""
    judged = [row for row in rows if row.kind in (*_RUNS, "not started")]
    lines = [f"Of the {len(judged)} classes whose updates were judged, so many rely on", ""]
    lines += ["| what | classes |", "|---|---|"]
    for what in ALL:
        those = [row.architecture for row in judged if what in row.relies_on]
        lines.append(f"| {what} | {len(those)}{': ' if those else ''}{', '.join(those)} |")
    return [*lines, ""]


def _gaps(rows: list[Row]) -> list[str]:
    """What small models do not have, or do not load."""
    gaps = [(row, "; ".join(_gap(row))) for row in rows if _gap(row) and row.kind in _RUNS]
    if not gaps:
        return []
    lines = ["Kinds of layers that a small model lost, and parameters that no name reached:", ""]
    lines += ["| class | what |", "|---|---|"]
    return [*lines, *(f"| {row.architecture} | {_escaped(gap)} |" for row, gap in gaps), ""]


def _gap(row: Row) -> list[str]:
    lost = [f"no {one}" for one in row.lost]
    return lost + ([f"{row.held - row.reached} parameters"] if row.unreached else [])


def _counted(row: Row) -> str:
    return f"{row.architecture} ({row.names})" if row.names else row.architecture


def _escaped(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
