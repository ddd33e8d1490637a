"""Flattened buckets whose layout was unpickled before, told by their bytes.

SGLang's clients send a bucket as a pickle of `{"flattened_tensor": ..., "metadata": [...]}`. Of
18,000 names, the metadata takes 2 MB and longer to unpickle than all weights to cast, and it is the
same in every refit. A pickle is a program for a small stack machine, so it can be cut behind the key
`"metadata"`: the head is short and has the tensor's handle, which is new each time; the tail has the
metadata. If a tail was seen behind an equivalent head, its result is known and only the head runs, in
SGLang's own unpickler.

Equivalent: the same instructions with the same strings; numbers and bytes (the handle) may differ.
A tail is kept only if nothing else of its head can reach it.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

# Metadata of about 40 tensors: below, comparing costs as much as unpickling.
SMALLEST = 4096
# Of all tails together: eight refits of a model with 130,000 tensors. The one longest unused goes.
MAX_BYTES = 128 * 2**20

_KEYS = {"flattened_tensor", "metadata"}
_CUT = b"\x8c\x08metadata\x94"  # SHORT_BINUNICODE "metadata", MEMOIZE
_PREAMBLE, _FRAMED = b"\x80\x04", b"\x80\x04\x95"  # protocol 4; behind it a frame's opcode
_FRAME_END = 11  # and the frame's length in 8 bytes
_NO_METADATA = b"]u."  # EMPTY_LIST, SETITEMS, STOP
_PLAIN = {str, int, torch.Size, torch.dtype}
# Of pickle's instructions, those that Python's own pickler writes for such objects.
_STRINGS = {"SHORT_BINUNICODE", "BINUNICODE"}
_GETS = {"BINGET", "LONG_BINGET"}
_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1"}
_IN_TAIL = _STRINGS | _GETS | _NUMBERS | {
    "FRAME", "MEMOIZE", "MARK", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD", "SETITEM", "SETITEMS", "APPEND", "APPENDS",
    "STOP",
}  # fmt: skip


@dataclass(frozen=True)
class _Known:
    tail: bytes
    head: tuple
    metadata: tuple


class PickledBuckets:
    """Unpickles what clients sent, and remembers the layouts of flattened buckets.

    Attributes:
        in_use: for the hook: whether this process serves a model of ours.
    """

    def __init__(self) -> None:
        self.in_use = False
        self._known: list[_Known] = []  # the last used one first

    def deserialize(self, original: Callable[[Any], Any], data: Any) -> Any:
        """What `original(data)` returns; but a bucket's metadata is a tuple, the same as last time.

        Args:
            original: SGLang's `MultiprocessingSerializer.deserialize`.
            data: bytes, or base64 as a string.
        """
        if isinstance(data, str):
            import pybase64

            data = pybase64.b64decode(data, validate=True)
        if not isinstance(data, bytes) or len(data) < SMALLEST or not data.startswith(_FRAMED):
            return original(data)
        for position, known in enumerate(self._known):
            if not data.endswith(known.tail):
                continue
            head = data[: -len(known.tail)]
            if _instructions(head) != known.head:
                continue
            self._known.insert(0, self._known.pop(position))
            payload = original(_without_metadata(head))
            payload["metadata"] = known.metadata
            return payload
        payload = original(data)
        learned = _learn(data, payload)
        if learned is not None:
            payload["metadata"] = learned.metadata
            self._known.insert(0, learned)
            while len(self) > 1 and self.nbytes > MAX_BYTES:
                self._known.pop()
        return payload

    def __len__(self) -> int:
        return len(self._known)

    @property
    def nbytes(self) -> int:
        return sum(len(known.tail) for known in self._known)


def _learn(data: bytes, payload: Any) -> _Known | None:
    """The layout of `data`, which unpickles to `payload`; None where the cut might not be exact."""
    if (
        type(payload) is not dict
        or payload.keys() != _KEYS
        or type(payload["metadata"]) is not list
    ):
        return None
    attributes = [getattr(one, "__dict__", {"": one}) for one in payload["metadata"]]
    if any(type(value) not in _PLAIN for each in attributes for value in each.values()):
        return None
    cut = data.find(_CUT) + len(_CUT)
    head, tail = data[:cut], data[cut:]
    instructions = _instructions(head)
    if instructions is None or not _leaves_only_the_metadata(head):
        return None
    if not _stands_alone(tail, instructions):
        return None
    return _Known(tail, instructions, tuple(payload["metadata"]))


def _instructions(head: bytes) -> tuple | None:
    """Opcodes and strings of a head; None if it is not one frame's beginning up to the cut."""
    found: list[tuple[str, Any]] = []
    try:
        # With a STOP, so that what ends within an instruction is an error.
        for opcode, argument, position in pickletools.genops(head + b"."):
            if opcode.name == "FRAME":
                if position != len(_PREAMBLE):
                    return None
                continue
            name = "INT" if opcode.name in _NUMBERS else opcode.name
            keeps = name in _STRINGS or name in _GETS
            found.append((name, argument if keeps else None))
    except ValueError:
        return None
    is_cut = found[-3:] == [("SHORT_BINUNICODE", "metadata"), ("MEMOIZE", None), ("STOP", None)]
    return tuple(found) if is_cut else None


def _without_metadata(head: bytes) -> bytes:
    """A pickle of its own: unframed, with an empty list where the tail was."""
    return _PREAMBLE + head[_FRAME_END:] + _NO_METADATA


class _Inert:
    """Stands for every class and function of a head that is only looked at."""

    def __new__(cls, *_: Any) -> _Inert:
        return object.__new__(cls)

    def __setstate__(self, _: Any) -> None:
        pass


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert


def _leaves_only_the_metadata(head: bytes) -> bool:
    """Whether behind the head nothing is missing but the metadata. Opens no handle."""
    try:
        payload = _InertUnpickler(io.BytesIO(_without_metadata(head))).load()
    except (pickle.UnpicklingError, TypeError, IndexError, KeyError, AttributeError):
        return False
    return type(payload) is dict and payload.keys() == _KEYS and payload["metadata"] == []


def _stands_alone(tail: bytes, head: tuple) -> bool:
    """Whether the tail takes nothing from the head but strings and globals, which are equal in
    equivalent heads, and does not send a tensor of its own.

    Args:
        head: its `_instructions`.
    """
    memo = [made for made, one in pairwise(head) if one[0] == "MEMOIZE"]
    argument: Any
    for opcode, argument, _ in pickletools.genops(tail):
        name = opcode.name
        if name in _GETS and argument < len(memo):
            made_by, text = memo[argument]
            if made_by not in _STRINGS | {"STACK_GLOBAL"} or text == "flattened_tensor":
                return False
        elif name not in _IN_TAIL or argument == "flattened_tensor":
            return False
    return True
