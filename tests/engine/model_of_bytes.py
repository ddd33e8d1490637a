"""What an engine has to hold and say after any run of requests, by the simplest means.

The bytes are those of the plain reference cast, and what is expected of the status is three sentences:
it is consistent if every tensor comes from the last refit that was whole, nothing has failed since, and no
session and no half of a pair is open.
"""

from __future__ import annotations

import functools

import torch
from machine_commands import FP8_NAMES, NAMES, Step, version

from sglang_fp8rl.numerics.fingerprint import plain_number, scaled_number
from sglang_fp8rl.numerics.reference import quantize_blockwise

BLOCK = (128, 128)
Stored = tuple[torch.Tensor, ...]  # codes and scales, or one tensor in BF16


@functools.cache
def bytes_of(name: str, number: int) -> Stored:
    """Of a tensor of one version, as it has to be served."""
    weight = version(number)[name]
    return quantize_blockwise(weight) if name in FP8_NAMES else (weight.bfloat16(),)


@functools.cache
def number_of(name: str, number: int) -> int:
    return _number(name, bytes_of(name, number))


def _number(name: str, stored: Stored) -> int:
    shape = tuple(stored[0].shape)
    start = (0,) * len(shape)
    if len(stored) == 1:
        return plain_number(name, stored[0], shape, start)
    return scaled_number(name, stored[0], stored[1], shape, start, BLOCK)


class ModelOfBytes:
    """Follows every request.

    Attributes:
        versions: of every name; None where two versions are in one tensor.
        has_failed: since the last whole refit.
        is_open: whether a session is.
        halves: FP8 weights whose scale has not come.
        last_was_whole: whether nothing but one whole refit came last.
    """

    def __init__(self) -> None:
        self.versions: dict[str, int | None] = dict.fromkeys(NAMES, 0)
        self._numbers = {name: number_of(name, 0) for name in NAMES}
        self._stored: dict[str, Stored] = {name: bytes_of(name, 0) for name in NAMES}
        self.has_failed = self.is_open = False
        self.halves: set[str] = set()

    def numbers(self) -> dict[str, int]:
        """What the fingerprint has to be."""
        return dict(self._numbers)

    @property
    def is_of_one_version(self) -> bool:
        return len(set(self.versions.values())) == 1 and None not in self.versions.values()

    def whole(self) -> None:
        """A refit came that was whole: it mends everything."""
        self.has_failed = False

    def begin(self) -> bool:
        """Returns whether it has to succeed; as all methods below."""
        succeeds, self.is_open = not self.is_open, True
        return succeeds

    def end(self) -> bool:
        if not self.is_open:
            return False
        self.is_open = False
        return not self._halves_are_given_up()

    def disk(self, number: int) -> bool:
        self._store(NAMES, number)
        self._halves_are_given_up()
        self.whole()
        return True

    def call(self, step: Step) -> bool:
        """One update with tensors."""
        if step.fault in ("pickle", "empty", "layout"):
            self.has_failed = True
            if step.fault != "pickle":  # what can't be read is refused before anything looks at it
                self.halves.clear()
            return False
        wrong = step.names[step.at]
        stored = list(step.names)
        if step.fault == "shape":
            stored = stored[: step.at]
        if step.fault in ("nan", "half"):
            stored.remove(wrong)
        if step.form == "pairs":
            self.halves -= set(stored)
        self._store(stored, step.version)
        if step.fault == "nan":
            self._store_but_the_first(wrong, step.version)
        if step.fault == "half":
            self.halves.add(wrong)
        if step.fault in ("nan", "shape", "unknown"):
            self.halves.clear()
            self.has_failed = True
            return False
        if step.flush and not self.is_open:
            return not self._halves_are_given_up()
        return True

    def _halves_are_given_up(self) -> bool:
        were_there = bool(self.halves)
        self.has_failed |= were_there
        self.halves.clear()
        return were_there

    def _store(self, names: tuple[str, ...] | list[str], number: int) -> None:
        for name in names:
            self.versions[name] = number
            self._numbers[name] = number_of(name, number)
            self._stored[name] = bytes_of(name, number)

    def _store_but_the_first(self, name: str, number: int) -> None:
        """Its first value was NaN: of an FP8 tensor the first block stays, of another the first row."""
        mixed = tuple(part.clone() for part in bytes_of(name, number))
        old, kept = self._stored[name], BLOCK if name in FP8_NAMES else (1,)
        mixed[0][tuple(map(slice, kept))] = old[0][tuple(map(slice, kept))]
        if name in FP8_NAMES:
            mixed[1][0, 0] = old[1][0, 0]
        elif mixed[0].dim() == 1:
            mixed = old
        self._stored[name], self._numbers[name] = mixed, _number(name, mixed)
        if mixed is not old:
            self.versions[name] = None
