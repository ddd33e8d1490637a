"""Where tensors lie in one flattened bucket, as one string.

SGLang describes a bucket with one pickled object per tensor: of 18,000 names, unpickling them takes
longer than anything else in a refit. A string of JSON costs one comparison instead: if it is the
string of the last refit, nothing in it has to be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import RefitError

VERSION = 2  # also of how a bucket names its buffer (`staging`)
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
                  torch.uint8, torch.int32, torch.int64)
}  # fmt: skip
_COLUMNS = ("names", "shapes", "dtypes", "starts", "ends")


def flat_tensor(
    name: str, shape: torch.Size, dtype: torch.dtype, start: int, end: int
) -> SimpleNamespace:
    """One tensor of a bucket, with the attributes of SGLang's own metadata; every unpickler of SGLang's takes it.

    Args:
        start, end: in bytes of the bucket; `numel` is their difference, as SGLang has it.
    """
    return SimpleNamespace(
        name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start
    )


def to_text(tensors: Iterable[Any]) -> str:
    """Describe a bucket's `flat_tensor`s in one string; equal layouts, equal strings."""
    rows = [
        (t.name, list(t.shape), str(t.dtype).removeprefix("torch."), t.start_idx, t.end_idx)
        for t in tensors
    ]
    table = dict(zip(_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    return json.dumps({"version": VERSION, **table}, separators=(",", ":"))


def from_text(text: str) -> list[SimpleNamespace]:
    """The tensors of `to_text`; raises `RefitError` for any other text. Where they lie is not checked here."""
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise _unreadable(repr(text[:80]), f"it is JSON ({error})") from error
    if not isinstance(table, dict) or table.get("version") != VERSION:
        raise _unreadable(repr(text[:80]), f"this server reads a layout of version {VERSION}")
    columns: list[Any] = [table.get(name) for name in _COLUMNS]
    lengths = [len(column) if isinstance(column, list) else None for column in columns]
    if None in lengths or len(set(lengths)) != 1:
        found = ", ".join(f"{n} of {name}" for n, name in zip(lengths, _COLUMNS, strict=True))
        raise _unreadable(found, "each tensor has a name, a shape, a dtype, a start and an end")
    names, shapes, dtypes, starts, ends = columns
    sides = [side for shape in shapes if type(shape) is list for side in shape]
    if not (_are(str, names + dtypes) and _are(list, shapes) and _are(int, starts + ends + sides)):
        raise _unreadable(
            repr(text[:80]),
            "names and dtypes are text, shapes are lists of whole numbers, so are starts and ends",
        )
    unknown = set(dtypes) - DTYPES.keys()
    if unknown:
        raise _unreadable(f"dtypes {sorted(unknown)}", f"known dtypes are {sorted(DTYPES)}")
    return [
        flat_tensor(name, torch.Size(shape), DTYPES[dtype], start, end)
        for name, shape, dtype, start, end in zip(*columns, strict=True)
    ]


def _are(kind: type, values: list[Any]) -> bool:
    return set(map(type, values)) <= {kind}


def _unreadable(value: str, rule: str) -> RefitError:
    return RefitError(
        "the layout of a flattened bucket",
        value,
        rule,
        "Make the bucket with RefitClient of the server's version; nothing of it was read.",
    )
