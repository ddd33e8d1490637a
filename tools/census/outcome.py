"""What became of one model class, and of all of them."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_fp8rl.errors import Fp8RlError

OUT_OF_TIME = "not done after"
NO_EXPERTS = "has no experts"
KINDS = ("replayed", "native", "draft", "broken", "refused", "not started", "not built")


@dataclass
class Row:
    """One model class.

    Attributes:
        architecture: its name in SGLang's registry.
        kind: one of `KINDS`.
        names: tensors that were sent.
        reasons: why it is native, broken, refused, not started or not built.
        silent: places whose bytes differ from those of a fresh load, without a reason given.
        named_by: where the names of its checkpoint come from.
        reached, held: parameters that the names reached, of all that the model holds.
        unreached: the others.
        lost: kinds of layers of the real model that the small one has not.
        relies_on: what it needs beside copies of its loaders.
        schemes: modules of each scheme (`blockwise`, `per_channel`), on all ranks.
        unproven: places that appeared at its first forward pass, which updates leave as they are.
        is_parted: whether updates of one tensor to a call leave the bytes of a fresh load.
        whole_only: why it takes no such update.
        other_names: whether it takes its names with and without `language_model.`.
        not_started: why SGLang's start failed behind the load, here on the CPU.
        not_run: why no token of it was compared.
        is_proven: whether one was, and is a fresh model's.
    """

    architecture: str
    kind: str
    names: int = 0
    reasons: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    named_by: str = ""
    reached: int = 0
    held: int = 0
    unreached: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    relies_on: list[str] = field(default_factory=list)
    schemes: dict[str, int] = field(default_factory=dict)
    unproven: list[str] = field(default_factory=list)
    is_parted: bool = False
    whole_only: str = ""
    other_names: bool = False
    not_started: str = ""
    not_run: str = ""
    is_proven: bool = False
    seconds: float = 0.0

    @property
    def is_judged(self) -> bool:
        """Whether its updates were compared with a fresh load."""
        return self.kind in ("replayed", "native", "not started")

    @property
    def is_left_out(self) -> bool:
        """Whether the layout parts experts, and it has none."""
        return self.reasons == [NO_EXPERTS]

    @property
    def is_cut_short(self) -> bool:
        """Whether it ran out of time, which depends on the machine."""
        return any(reason.startswith(OUT_OF_TIME) for reason in self.reasons)

    def as_dict(self) -> dict[str, Any]:
        """For a results file: what is the same in every run."""
        return {key: value for key, value in asdict(self).items() if value and key != "seconds"}


def summary(rows: Sequence[Row]) -> str:
    """The last line of the command."""
    rows = [row for row in rows if not row.is_left_out]
    counts = Counter(row.kind for row in rows)
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
    proven = sum(row.is_proven for row in rows)
    silent = sum(bool(row.silent) for row in rows)
    return f"{len(rows)} classes: {kinds}; {proven} proven by a token; {silent} silent"


def line_of(error: BaseException) -> str:
    """With the function that raised it, where nothing else says what is wrong."""
    traceback.print_exception(error)  # into the log
    if _NO_DRIVER in str(error):
        return f"needs a GPU for the Triton kernel of {_place_of(error)}"
    text = re.sub(r"https?://[^\s']+", "…", " ".join(str(error).split()))
    if isinstance(error, Fp8RlError):
        return text[:400]
    place = "" if text else f" in {_place_of(error)}"
    return f"{type(error).__name__}: {text}"[:400] + place


_NO_DRIVER = "active drivers"  # Triton's word for a machine without a GPU


def _place_of(error: BaseException) -> str:
    """Function and file that raised it: of SGLang, where one of those did."""
    frames = traceback.extract_tb(error.__traceback__)
    found = [frame for frame in frames if "/sglang/" in frame.filename] or list(frames)
    return f"{found[-1].name} in {Path(found[-1].filename).name}"
