"""The measurements of a run, a JSON line each, written as they come: an interrupted run goes on from them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import EvaluationError
from ..terminal import can_be_written
from .noise import Fit
from .quantized_products import Operand
from .samples import Sample

_FORMAT = {"format": "sglang-fp8rl/sensitivity", "version": 1}
_BEGINNING = json.dumps({"row": "run", **_FORMAT}).removesuffix("}")


@dataclass
class Measurements:
    """What is known so far. All sums are in nats, one per sample.

    Attributes:
        effects: (module, operand) to KL with that module alone quantized.
        fits: module to how well its operands fit.
        sets: exempt modules, sorted, to KL with all others quantized.
    """

    samples: list[Sample] = field(default_factory=list)
    effects: dict[tuple[str, Operand], list[float]] = field(default_factory=dict)
    fits: dict[str, Fit] = field(default_factory=dict)
    sets: dict[tuple[str, ...], list[float]] = field(default_factory=dict)

    def take(self, row: Mapping[str, Any]) -> None:
        match row["row"]:
            case "sample":
                self.samples.append(Sample(tuple(row["prompt"]), tuple(row["answer"])))
            case "fit":
                self.fits[row["module"]] = Fit.from_row(row)
            case "effect":
                self.effects[row["module"], Operand(row["operand"])] = row["kl"]
            case "set":
                self.sets[tuple(row["exempt"])] = row["kl"]


class ResultsFile:
    """Appends measurements to a file, each line flushed; reads what an earlier run left.

    Args:
        path: made if it is not there.
        key: what the measurements belong to: model, plan, prompts, options. Another key is refused.

    Raises:
        EvaluationError: the file belongs to another run, is damaged, or can't be opened.
    """

    def __init__(self, path: Path, key: Mapping[str, Any]) -> None:
        self.known = Measurements()
        rows = _read(path)
        if rows:
            _check_key(path, rows[0].get("key") or {}, json.loads(json.dumps(key)))
        for n, row in enumerate(rows, start=1):
            try:
                self.known.take(row)
            except (KeyError, TypeError, ValueError) as error:
                raise _damaged(f"{path}:{n}", json.dumps(row)) from error
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            rule = "the file has to be writable"
            raise _refused(str(error), rule, "Choose another place.") from error
        if not rows:
            self.add("run", **_FORMAT, key=key)

    def close(self) -> None:
        self._file.close()

    def add(self, row: str, **values: Any) -> None:
        """Take a row of this kind down, here and in the file."""
        whole = {"row": row, **values}
        self.known.take(whole)
        self._file.write(json.dumps(whole) + "\n")
        self._file.flush()


def check_place(path: Path) -> None:
    """Refuse, before any work is done, what could not be taken as results then. Raises as `ResultsFile`."""
    _read(path)
    if not can_be_written(path):
        raise _refused(str(path), "the file has to be writable", "Choose another place.")


def _check_key(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name in ours.keys() | theirs.keys():
        if ours.get(name) != theirs.get(name):
            found = f"{path} was measured with {name} {theirs.get(name)!r}, now it is {ours.get(name)!r}"
            rule = "measurements of two runs don't mix"
            raise _refused(found, rule, "Choose another file, or delete this one.")


def _read(path: Path) -> list[dict[str, Any]]:
    """All whole lines. Half a last line, of a run that was killed while it wrote, is cut off."""
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = "it has to be a file of JSON lines"
        raise _refused(f"{path}: {error}", rule, "Choose another file.") from error
    if not text.startswith(_BEGINNING[: len(text)]):  # not ours: nothing is cut off
        rule = "it has to hold {format!r} measurements, version {version}".format(**_FORMAT)
        raise _refused(f"{path} begins with {text[:60]!r}", rule, "Choose another file.")
    whole, end, rest = text.rpartition("\n")
    if rest:
        os.truncate(path, len((whole + end).encode()))
    return [_parsed(f"{path}:{n}", line) for n, line in enumerate(whole.splitlines(), start=1)]


def _parsed(where: str, line: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict) and "row" in row:
            return row
    raise _damaged(where, line)


def _damaged(where: str, line: str) -> EvaluationError:
    return EvaluationError(
        where,
        repr(line[:60]),
        "each line is a JSON object with a `row`, and what belongs to that",
        "Delete it and all behind it to measure them again, or choose another file.",
    )


def _refused(found: str, rule: str, remedy: str) -> EvaluationError:
    return EvaluationError("--results", found, rule, remedy)
