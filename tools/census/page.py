"""The census in `docs/models.md`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .outcome import KINDS, Row, summary
from .results import FOLDER, described

_TITLES = {
    "replayed": "An update is written from its recipe, and leaves the bytes of a fresh load",
    "native": "The same bytes; an update goes through SGLang's loaders every time",
    "refused": "The server does not start, or the update fails, and says why",
    "not built": "Nothing is known: no small model of it could be loaded here",
}


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
            lines += _listed(those) if kind == "replayed" else _table(those)
            lines.append("")
    return "\n".join(lines)


def _listed(rows: list[Row]) -> list[str]:
    return [", ".join(f"{row.architecture} ({row.names})" for row in rows) + "."]


def _table(rows: list[Row]) -> list[str]:
    """Classes with the same reasons share a line."""
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        alike.setdefault(tuple(row.reasons), []).append(row)
    lines = ["| classes | why |", "|---|---|"]
    for reasons, those in alike.items():
        why = _escaped("; ".join(reasons))
        lines.append(f"| {', '.join(map(_counted, those))} | {why} |")
    return lines


def _counted(row: Row) -> str:
    return f"{row.architecture} ({row.names})" if row.kind == "native" else row.architecture


def _escaped(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
