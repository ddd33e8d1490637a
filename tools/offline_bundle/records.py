"""RECORD files that list what is left of a distribution, so that metadata readers are not misled."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

# `importlib.metadata` reads these; licences are what redistribution asks for.
DROPPED_METADATA = ("INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json")


def read_record(info: Path) -> list[str]:
    """The paths of a RECORD. It is CSV: SGLang's tuning tables have commas in their names."""
    with (info / "RECORD").open(newline="") as file:
        return [row[0] for row in csv.reader(file) if row]


def shrink_record(info: Path, kept: Iterable[str]) -> None:
    """Rewrite RECORD to `kept`, without digests: stripped libraries have others.

    transformers asks `importlib.metadata.packages_distributions` which modules exist, and that
    reads RECORD; so it has to be there and true.
    """
    record = info / "RECORD"
    record.unlink()  # a link to uv's cache: never written through
    with record.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows((path, "", "") for path in sorted(kept))
