"""What became of one model class, and of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OUT_OF_TIME = "not done after"
KINDS = ("replayed", "native", "refused", "not built")


@dataclass
class Row:
    """One model class.

    Attributes:
        architecture: its name in SGLang's registry.
        kind: one of `KINDS`.
        names: tensors that were sent.
        reasons: why it is native, refused or not built.
        silent: places whose bytes differ from those of a fresh load, without a reason given.
        named_by: where the names of its checkpoint come from.
        reached, held: parameters and buffers that the names reached, of all that the model holds.
    """

    architecture: str
    kind: str
    names: int = 0
    reasons: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    named_by: str = ""
    reached: int = 0
    held: int = 0
    seconds: float = 0.0

    @property
    def is_cut_short(self) -> bool:
        """Whether it ran out of time, which depends on the machine."""
        return any(reason.startswith(OUT_OF_TIME) for reason in self.reasons)

    def as_dict(self) -> dict[str, Any]:
        """For a results file: what is the same in every run."""
        return {key: value for key, value in asdict(self).items() if value and key != "seconds"}


def summary(rows: Sequence[Row]) -> str:
    """The last line of the command."""
    counts = Counter(row.kind for row in rows)
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
    return f"{len(rows)} classes: {kinds}; {sum(bool(row.silent) for row in rows)} silent"
