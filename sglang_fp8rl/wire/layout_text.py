"""Where tensors lie in one flattened bucket, as one string.

SGLang describes a bucket with one pickled object per tensor: of 18,000 names, unpickling them takes
longer than anything else in a refit. A string of JSON costs one comparison instead: if it is the
string of the last refit, nothing in it has to be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

VERSION = 1
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
                  torch.uint8, torch.int32, torch.int64)
}  # fmt: skip


@dataclass(frozen=True)
class FlatTensor:
    """One tensor of a bucket: the attributes that SGLang's own metadata has.

    Attributes:
        start_idx, end_idx: in bytes of the bucket; `numel` is their difference, as SGLang has it.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int

    @property
    def numel(self) -> int:
        return self.end_idx - self.start_idx


def to_text(tensors: Iterable[Any]) -> str:
    """Describe `FlatTensor`s, or SGLang's objects, in one string; equal layouts, equal strings."""
    rows = [(t.name, list(t.shape), _name(t.dtype), t.start_idx, t.end_idx) for t in tensors]
    columns = ("names", "shapes", "dtypes", "starts", "ends")
    table = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
    return json.dumps({"version": VERSION, **table}, separators=(",", ":"))


def from_text(text: str) -> list[FlatTensor]:
    """The tensors of `to_text`.

    Raises:
        ValueError: it is not such a string, of another version, or has a dtype we don't know.
    """
    table = json.loads(text)
    if not isinstance(table, dict) or table.get("version") != VERSION:
        raise ValueError(f"a bucket's layout of version {VERSION} was expected: {text[:80]!r}")
    unknown = set(table["dtypes"]) - DTYPES.keys()
    if unknown:
        raise ValueError(f"dtypes {sorted(unknown)} in a bucket; known are {sorted(DTYPES)}")
    return [
        FlatTensor(name, torch.Size(shape), DTYPES[dtype], int(start), int(end))
        for name, shape, dtype, start, end in zip(
            table["names"], table["shapes"], table["dtypes"], table["starts"], table["ends"],
            strict=True,
        )
    ]  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
