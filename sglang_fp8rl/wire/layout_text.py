"""Where tensors lie in one flattened bucket, as one string of JSON: if it is that of the last refit, nothing in it has to
be read. To unpickle SGLang's object per tensor takes, of 18,000, longer than anything else in a refit.
"""

from __future__ import annotations

import json
from operator import index
from types import SimpleNamespace
from typing import NamedTuple

import torch

from ..errors import RefitError

VERSION = 2  # also of how a bucket names its buffer (`staging`)
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
                  torch.uint8, torch.int32, torch.int64,
                  # An older server refuses these with the list of what it knows.
                  torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bool,
                  torch.float64, torch.complex64, torch.complex128, torch.float8_e5m2,
                  torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Columns(NamedTuple):
    """The tensors of a bucket: in a list each their names, shapes, dtypes, and the bytes that they begin and end at."""

    names: list[str]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    starts: list[int]
    ends: list[int]

    def flat_tensors(self) -> list[SimpleNamespace]:
        """One object each, with the attributes of SGLang's own metadata (`numel` is bytes too); every unpickler of
        SGLang's takes it."""
        return [
            SimpleNamespace(
                name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start
            )
            for name, shape, dtype, start, end in zip(*self, strict=True)
        ]

    def to_text(self) -> str:
        """All in one string; equal layouts, equal strings."""
        table = self._asdict() | {"dtypes": [NAMES[one] for one in self.dtypes]}
        return json.dumps({"version": VERSION, **table}, separators=(",", ":"))


def from_text(text: str) -> list[SimpleNamespace]:
    """The tensors of a text; raises `RefitError` for any other one. Where they lie is not checked here."""
    try:
        table = json.loads(text)
        if table["version"] != VERSION:
            raise ValueError(f"version {table['version']!r}")
        "".join(table["names"])  # all of them are text
        names, shapes, dtypes, starts, ends = (table[column] for column in Columns._fields)
        columns = Columns(
            names,
            [torch.Size(shape) for shape in shapes],
            [DTYPES[dtype] for dtype in dtypes],
            [index(start) for start in starts],
            [index(end) for end in ends],
        )
        return columns.flat_tensors()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RefitError(
            "the layout of a flattened bucket",
            f"{text[:80]!r} ({type(error).__name__}: {error})",
            f"it is JSON of version {VERSION}: for each tensor a name, a shape (a list of whole numbers), a known "
            f"dtype ({', '.join(DTYPES)}), and as whole numbers a start and an end",
            "Make the bucket with RefitClient of the server's version; nothing of it was read.",
        ) from error
