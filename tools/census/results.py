"""What a census found, on file: with the commit and the versions that it was found on."""

from __future__ import annotations

import datetime
import json
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from .layout import ONE_RANK, Layout
from .outcome import Row

REPOSITORY = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "results"
PACKAGES = ("sglang", "torch", "transformers")


def provenance() -> dict[str, str]:
    """Commit (with `+` where the package was changed since), date and versions."""
    commit = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    if _git("status", "--porcelain", "--", "sglang_fp8rl"):
        commit += "+"
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"commit": commit, "date": today} | {name: version(name) for name in PACKAGES}


def described(origin: dict[str, str]) -> str:
    """A sentence on where results are from, of their `provenance`."""
    versions = ", ".join(f"{name} {origin[name]}" for name in PACKAGES)
    return f"From commit `{origin['commit']}` of {origin['date']}, with {versions}."


def _git(*args: str) -> str:
    ended = subprocess.run(
        ["git", *args], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return ended.stdout.strip()


def path_of(host: str, layout: Layout = ONE_RANK) -> Path:
    folder = FOLDER if layout == ONE_RANK else FOLDER / layout.name
    return folder / f"{host}.json"


def newest(layout: Layout = ONE_RANK) -> tuple[dict[str, str], dict[str, Row]]:
    """Provenance and rows, by class, of the newest host; both empty if it was not judged at this layout."""
    path = path_of(max(FOLDER.glob("*.json")).stem, layout)
    return read(path) if path.exists() else ({}, {})


def read(path: Path) -> tuple[dict[str, str], dict[str, Row]]:
    """Provenance and rows, by class, of one file."""
    found = json.loads(path.read_text())
    return found["provenance"], {one["architecture"]: Row(**one) for one in found["rows"]}


def write(rows: Sequence[Row], layout: Layout = ONE_RANK) -> Path:
    """All rows of this host and layout."""
    found = {
        "provenance": provenance(),
        "rows": [row.as_dict() for row in sorted(rows, key=lambda one: one.architecture)],
    }
    path = path_of(version("sglang"), layout)
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(found, indent=1).replace(f"{tempfile.gettempdir()}/", "")  # what errors name
    path.write_text(text + "\n")
    return path


def changed(rows: Sequence[Row], layout: Layout = ONE_RANK, *, is_whole: bool = False) -> list[str]:
    """Classes whose outcome is not the one on file for this host and layout; of all judged to the end.

    Args:
        is_whole: whether these have to be all that are on file.
    """
    path = path_of(version("sglang"), layout)
    if not path.exists():
        return []
    known = read(path)[1]
    gone = known.keys() - {row.architecture for row in rows} if is_whole else ()
    lines = [f"{name}: not judged, on file {known[name].kind}" for name in sorted(gone)]
    for row in rows:
        before = known.get(row.architecture)
        is_cut_short = row.is_cut_short or (before is not None and before.is_cut_short)
        if not is_cut_short and (before is None or before.kind != row.kind):
            lines.append(
                f"{row.architecture}: {row.kind}, on file {before.kind if before else 'nothing'}"
            )
    return lines
