"""The measurements of a run, a JSON line each, written as they come: an interrupted run goes on from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .noise import Fit
from .quantized_products import Operand
from .reference import SensitivityError
from .samples import Sample

_FORMAT = "sglang-fp8rl/sensitivity"
_VERSION = 1


@dataclass
class Measurements:
    """What is known so far. All sums are in nats, one per sample.

    Attributes:
        samples: what is measured on.
        effects: (module, operand) to KL with that module alone quantized.
        fits: module to how well its operands fit.
        sets: exempt modules, sorted, to KL with all others quantized.
    """

    samples: list[Sample] = field(default_factory=list)
    effects: dict[tuple[str, Operand], list[float]] = field(default_factory=dict)
    fits: dict[str, Fit] = field(default_factory=dict)
    sets: dict[tuple[str, ...], list[float]] = field(default_factory=dict)


class ResultsFile:
    """Appends measurements to a file, each line flushed; reads what an earlier run left.

    Args:
        path: made if it is not there.
        key: what the measurements belong to: model, plan, prompts, options. Another key is refused.

    Raises:
        SensitivityError: the file belongs to another run, is damaged, or can't be opened.
    """

    def __init__(self, path: Path, key: Mapping[str, Any]) -> None:
        self.path = path
        self.known = Measurements()
        rows = _read(path)
        if rows:
            self._check_key(rows[0], key)
            for row in rows:
                _take(self.known, row)
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise SensitivityError(
                "--results", str(error), "the file can be written", "Choose another place."
            ) from error
        if not rows:
            self._append({"row": "run", "format": _FORMAT, "version": _VERSION, "key": dict(key)})

    def close(self) -> None:
        self._file.close()

    def add_sample(self, sample: Sample) -> None:
        """What divergence is measured on, in its order."""
        self.known.samples.append(sample)
        self._append({"row": "sample", "prompt": sample.prompt, "answer": sample.answer})

    def add_fit(self, module: str, fit: Fit) -> None:
        self.known.fits[module] = fit
        self._append({"row": "fit", "module": module, **fit.as_dict()})

    def add_effect(self, module: str, operand: Operand, kl: Sequence[float]) -> None:
        self.known.effects[module, operand] = list(kl)
        self._append({"row": "effect", "module": module, "operand": operand.value, "kl": list(kl)})

    def add_set(self, exempt: tuple[str, ...], kl: Sequence[float]) -> None:
        self.known.sets[exempt] = list(kl)
        self._append({"row": "set", "exempt": exempt, "kl": list(kl)})

    def _append(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def _check_key(self, first: Mapping[str, Any], key: Mapping[str, Any]) -> None:
        theirs = first.get("key")
        if first.get("format") != _FORMAT or first.get("version") != _VERSION or not theirs:
            raise SensitivityError(
                "--results",
                f"{self.path} begins with {str(first)[:60]!r}",
                f"it holds measurements of format {_FORMAT!r}, version {_VERSION}",
                "Choose another file.",
            )
        ours = json.loads(json.dumps(dict(key)))
        for name in ours.keys() | theirs.keys():
            if ours.get(name) != theirs.get(name):
                raise SensitivityError(
                    "--results",
                    f"{self.path} was measured with {name} {theirs.get(name)!r}, now it is "
                    f"{ours.get(name)!r}",
                    "measurements of two runs don't mix",
                    "Choose another file, or delete this one.",
                )


def _read(path: Path) -> list[dict[str, Any]]:
    """All whole lines. Half a last line, of a run that was killed while it wrote, is cut off."""
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SensitivityError(
            "--results", f"{path}: {error}", "it is a file of JSON lines", "Choose another file."
        ) from error
    whole, _, rest = text.rpartition("\n")
    if rest:
        with path.open("r+", encoding="utf-8") as file:
            file.truncate(len((whole + "\n").encode()) if whole else 0)
    rows = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or "row" not in row:
            raise SensitivityError(
                f"{path}:{number}",
                repr(line[:60]),
                "each line is a JSON object with a `row`",
                "Delete the line to measure it again, or choose another file.",
            )
        rows.append(row)
    return rows


def _take(known: Measurements, row: Mapping[str, Any]) -> None:
    kind = row["row"]
    if kind == "sample":
        known.samples.append(Sample(tuple(row["prompt"]), tuple(row["answer"])))
    elif kind == "fit":
        values = {name: row[name] for name in row if name not in ("row", "module")}
        known.fits[row["module"]] = Fit.from_dict(values)
    elif kind == "effect":
        known.effects[row["module"], Operand(row["operand"])] = row["kl"]
    elif kind == "set":
        known.sets[tuple(row["exempt"])] = row["kl"]
