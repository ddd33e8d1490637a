"""`GET /fp8rl/fingerprint` as a client sees it: one number per checkpoint name, and how two compare.

What a number is: `numerics/fingerprint.py`. Numbers of one name compare where its *form* is the same: the
dtype it is served in and, for FP8, what shares one scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import MAX_LISTED, RefitError
from ..numerics.fingerprint import MASK

FINGERPRINT_PATH = "/fp8rl/fingerprint"
FINGERPRINT_FORMAT = "sglang-fp8rl/fingerprint"
FINGERPRINT_VERSION = 1


@dataclass(frozen=True)
class Number:
    """Of one name, or of a part of it."""

    form: str  # `bfloat16`, `float8_e4m3fn[128,128]`, … (`form_of`)
    value: int  # 64 bits
    numel: int | None = None  # elements that it is of; None for the whole tensor

    def __add__(self, other: Number) -> Number:
        """Of two boxes of one tensor together."""
        if self.form != other.form or self.numel is None or other.numel is None:
            raise ValueError(f"{self} and {other} are not parts of one tensor")
        return Number(self.form, (self.value + other.value) & MASK, self.numel + other.numel)


def form_of(dtype: str, block: Iterable[int] | None = None) -> str:
    """The form of a tensor served in `dtype`; `block` is what shares one scale."""
    return dtype if block is None else f"{dtype}[{','.join(map(str, block))}]"


@dataclass(frozen=True)
class Fingerprint:
    """What one server holds, or what a trainer would have it hold."""

    source: str  # whose it is, for messages
    numbers: Mapping[str, Number]
    # How a server's own copies differ (replicas on other ranks, weights derived from it); the number is the first's.
    differing: Mapping[str, str] = field(default_factory=dict)
    unproven: Mapping[str, str] = field(default_factory=dict)  # names without a number, and why

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "format": FINGERPRINT_FORMAT,
            "version": FINGERPRINT_VERSION,
            "tensors": {
                name: [one.form, f"{one.value:016x}"] for name, one in sorted(self.numbers.items())
            },
            "differing": dict(self.differing),
            "unproven": dict(self.unproven),
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], source: str) -> Fingerprint:
        """Read a server's answer. Raises `RefitError` if it is none, or of a version this one does not read."""
        found = (document.get("format"), document.get("version"))
        if found != (FINGERPRINT_FORMAT, FINGERPRINT_VERSION):
            raise RefitError(
                source,
                f"a document of format {found[0]!r}, version {found[1]!r}",
                f"a fingerprint says {FINGERPRINT_FORMAT!r}, version {FINGERPRINT_VERSION}",
                "Use the same sglang-fp8rl on both sides.",
            )
        numbers = {
            name: Number(form, int(text, 16)) for name, (form, text) in document["tensors"].items()
        }
        return cls(source, numbers, document["differing"], document["unproven"])


@dataclass(frozen=True)
class Verification:
    """How two fingerprints compare."""

    compared: int  # names that have comparable numbers on both sides
    differing: Mapping[str, str]  # names whose bytes differ, and how
    missing: Mapping[str, str]  # names that one side has and the other has not
    unproven: Mapping[str, str]  # names that could not be compared, and why

    @property
    def ok(self) -> bool:
        """Whether something was compared, nothing differs and nothing is missing; what is unproven stays so."""
        return bool(self.compared) and not self.differing and not self.missing

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}

    def check(self, subject: str) -> None:
        """Raises `RefitError` with the names, if anything differs or is missing, or nothing was compared."""
        if self.ok:
            return
        wrong = {**self.differing, **self.missing} or {"nothing was compared": "", **self.unproven}
        lines = [f"{name}: {text}".removesuffix(": ") for name, text in wrong.items()]
        more = f" and {len(lines) - MAX_LISTED} more" if len(lines) > MAX_LISTED else ""
        raise RefitError(
            subject,
            "; ".join(lines[:MAX_LISTED]) + more,
            "what is served is what was sent, byte for byte",
            "Send these tensors again, and verify again.",
        )


def compare(served: Fingerprint, other: Fingerprint, *, partial: bool = False) -> Verification:
    """Compare a server with a trainer, a checkpoint or another server; if `partial`, what `other` leaves out is not
    missing."""
    differing, unproven = {}, {**other.unproven, **served.unproven}
    for side in (other, served):  # of a name in both, what the server says
        differing.update({name: f"{side.source}: {text}" for name, text in side.differing.items()})
    missing, compared = {}, 0
    for name in sorted((served.numbers.keys() | other.numbers.keys()) - unproven.keys()):
        ours, theirs = served.numbers.get(name), other.numbers.get(name)
        if ours is None:
            missing[name] = f"not in {served.source}"
        elif theirs is None:
            if not partial:
                missing[name] = f"not in {other.source}"
        elif theirs.numel is not None:
            lacking = unproven if partial else missing
            lacking[name] = f"{other.source} has {theirs.numel} values of it, not all"
        elif ours.form != theirs.form:
            unproven[name] = (
                f"{ours.form} in {served.source}, {theirs.form} in {other.source}: other bytes by design"
            )
        else:
            compared += 1
            if ours.value != theirs.value:
                text = f"{served.source} and {other.source} have other bytes ({ours.form})"
                differing.setdefault(name, text)
    if partial:
        # What is no name of the checkpoint is derived from some.
        left_out = served.numbers.keys() - other.numbers.keys()
        differing = {name: text for name, text in differing.items() if name not in left_out}
        sent = other.numbers.keys() | other.unproven.keys()
        unproven = {name: text for name, text in unproven.items() if name in sent}
    return Verification(compared, differing, missing, unproven)
