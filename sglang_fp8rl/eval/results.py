"""The results file: JSON lines, append only, so that an interrupted run loses at most one line.

Two kinds of record: a *session* (what was asked of which server, under which settings) and a
*sample* (one response and its grade), keyed by (problem, sample, endpoint).
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import Fp8RlError

Key = tuple[str, int, str]  # problem id, sample index, endpoint


class ResultsError(Fp8RlError):
    """A results file that can't be continued."""


class ResultsFile:
    """Samples on disk; opening reads what is there, and locks the file against a second run.

    Attributes:
        samples: the records by key.
        sessions: the last session record of each endpoint.
        notes: what was repaired on opening, for the report.

    Raises:
        ResultsError: another run holds the file, or a line other than the last is broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples: dict[Key, dict[str, Any]] = {}
        self.sessions: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("a+b")
        except OSError as error:
            raise ResultsError(
                str(path), str(error), "results are appended to this file", "Choose another --out."
            ) from error
        try:
            self._lock()
            self._load()
        except ResultsError:
            self._file.close()
            raise

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin_session(self, endpoint: str, settings: dict[str, Any]) -> None:
        """Record how `endpoint` is asked from now on; refuse to mix settings under one endpoint.

        Raises:
            ResultsError: the samples there were taken under other settings, or from another model.
        """
        settings = json.loads(json.dumps(settings))  # as it will be read back
        before = self.sessions.get(endpoint)
        if before is None or not any(key[2] == endpoint for key in self.samples):
            if before is None or before["settings"] != settings:
                self._append({"kind": "session", "endpoint": endpoint, "settings": settings})
            return
        changed = {
            name: (before["settings"].get(name), settings.get(name))
            for name in before["settings"].keys() | settings.keys()
            if before["settings"].get(name) != settings.get(name)
        }
        if changed:
            told = "; ".join(
                f"{name} was {old!r}, is {new!r}" for name, (old, new) in sorted(changed.items())
            )
            raise ResultsError(
                f"{self.path} ({endpoint})",
                told,
                "samples of different settings must not be averaged",
                "Repeat the old settings to resume, or give another --out.",
            )

    def add(self, key: Key, problem_digest: str, record: dict[str, Any]) -> None:
        """Append one sample; it is on its way to the disk when this returns."""
        problem, sample, endpoint = key
        named = {"problem": problem, "sample": sample, "endpoint": endpoint}
        self._append({"kind": "sample", **named, "digest": problem_digest, **record})

    def find(self, key: Key, problem_digest: str) -> dict[str, Any] | None:
        """Return the sample of this key, if there is one.

        Raises:
            ResultsError: it answers another problem that had the same id.
        """
        record = self.samples.get(key)
        if record is not None and record["digest"] != problem_digest:
            raise ResultsError(
                f"{self.path}, problem {key[0]!r}",
                "its statement or answer differs from the data set's",
                "a sample belongs to the problem it was asked for",
                "Use the data set of the earlier run, or give another --out.",
            )
        return record

    def _append(self, record: dict[str, Any]) -> None:
        # One write of one line: a crash tears at most the last one.
        self._file.write(json.dumps(record, ensure_ascii=True).encode() + b"\n")
        self._file.flush()
        self._remember(record)

    def _remember(self, record: dict[str, Any]) -> None:
        if record["kind"] == "session":
            self.sessions[record["endpoint"]] = record
        else:
            self.samples[record["problem"], record["sample"], record["endpoint"]] = record

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ResultsError(
                str(self.path),
                "locked by another process",
                "one run writes to a results file at a time",
                "Wait for it, or give another --out.",
            ) from error

    def _load(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        complete, _, tail = content.rpartition(b"\n")
        for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
            try:
                self._remember(_record(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ResultsError(
                    f"{self.path}:{number}",
                    f"{error!r}; the line starts with {line[:60]!r}",
                    "each line is one record of an earlier run",
                    "Delete that line (its sample is taken again), or give another --out.",
                ) from error
        if tail:
            self._settle_tail(tail, kept=len(content) - len(tail))

    def _settle_tail(self, tail: bytes, kept: int) -> None:
        """The last line has no end: keep it if it is whole, cut it off if it was torn."""
        try:
            self._remember(_record(tail))
        except (ValueError, KeyError, TypeError):
            self._file.truncate(kept)
            self.notes.append(
                f"{self.path}: the last line was torn ({len(tail)} bytes, an interrupted run) and "
                "was cut off; its sample is taken again"
            )
        else:
            self._file.write(b"\n")
            self._file.flush()


def _record(line: bytes) -> dict[str, Any]:
    record = json.loads(line)
    required = {
        "session": ("endpoint", "settings"),
        "sample": ("problem", "sample", "endpoint", "digest", "status", "finish_reason"),
    }[record["kind"]]
    for name in required:
        record[name]  # KeyError names what is missing
    return record
