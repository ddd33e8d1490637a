"""What an engine has to hold after any run of requests: the bytes of the plain reference cast."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from support.by_definition import quantize_blockwise

from sglang_fp8rl.numerics.fingerprint import NumberTable, scaled_boxes, seed_of, tensor_number
from tools.fuzz.machine_commands import FP8_NAMES, NAMES, Step, version

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
        return tensor_number(stored[0], seed_of(name))
    return NumberTable([scaled_boxes(name, stored[0], [stored[1]], shape, start, BLOCK)]).numbers()[
        0
    ]


class ModelOfBytes:
    """Follows every request that stores something."""

    def __init__(self) -> None:
        self._numbers = {name: number_of(name, 0) for name in NAMES}
        self._stored: dict[str, Stored] = {name: bytes_of(name, 0) for name in NAMES}

    def numbers(self) -> dict[str, int]:
        """What the fingerprint has to be."""
        return dict(self._numbers)

    def store(self, names: Sequence[str], number: int) -> None:
        for name in names:
            self._numbers[name] = number_of(name, number)
            self._stored[name] = bytes_of(name, number)

    def call(self, step: Step) -> None:
        """One update with tensors: what of them is served, whatever the client is told."""
        if step.fault in ("pickle", "empty", "layout"):
            return
        wrong, stored = step.names[step.at], list(step.names)
        if step.fault == "shape":
            stored = stored[: step.at]
        if step.fault in ("nan", "half"):
            stored.remove(wrong)
        self.store(stored, step.version)
        if step.fault == "nan":
            self._store_but_the_first(wrong, step.version)

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
