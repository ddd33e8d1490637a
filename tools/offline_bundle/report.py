"""What went in and what did not, as tables and as JSON types."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from . import recipe
from .build import MIB, Built

LARGEST = 15


def as_dict(built: Built) -> dict[str, Any]:
    """For `--json`: every size in bytes, and the reason of everything that was left out."""
    return asdict(built) | {"archive": built.archive.name, "left_out": recipe.LEFT_OUT}


def print_report(built: Built, console: Console) -> None:
    taken = Table("distribution", "MiB unpacked", "why", title="in", title_justify="left")
    order = sorted(built.taken, key=lambda name: -built.taken[name])
    for name in order[:LARGEST]:
        taken.add_row(name, _mib(built.taken[name]), recipe.TAKEN.get(name, "this plugin"))
    rest = sum(built.taken[name] for name in order[LARGEST:])
    taken.add_row(f"{len(order) - LARGEST} more", _mib(rest), "")
    dropped = Table("left out of what is in", "MiB", title="stripped", title_justify="left")
    for what in sorted(built.dropped, key=lambda what: -built.dropped[what]):
        dropped.add_row(what, _mib(built.dropped[what]))
    dropped.add_row("symbol tables of libraries", _mib(built.stripped))
    out = Table("why", "distributions", title="left out", title_justify="left")
    reasons: dict[str, list[str]] = {}
    for name, why in recipe.LEFT_OUT.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        out.add_row(why, ", ".join(names))
    for table in (taken, dropped, out):
        console.print(table)
    parts = ", ".join(f"{name} {_mib(size)} MiB" for name, size in built.parts.items())
    console.print(f"{built.archive.name}: {_mib(built.nbytes)} MiB, {built.files} files ({parts})")
    console.print(f"sha256 {built.sha256}", highlight=False)
    if built.imported:
        console.print(f"{built.imported} of {built.imported} modules imported on a host")


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"
