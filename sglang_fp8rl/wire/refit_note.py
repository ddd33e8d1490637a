"""What a client says of its refit: one JSON object in the field `rid` of its requests.

SGLang hands `rid` on unread, over HTTP and in every request class of every supported version, so a note
needs no endpoint of its own. docs/reliability.md has the format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RefitError

KEY = "fp8rl_refit"
ALL, PARTIAL = "all", "partial"
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RefitNote:
    """Which refit a request belongs to, and what that refit brings.

    Attributes:
        id: any text; the same for all requests of one refit.
        version: of the weights.
        wants_all: whether every parameter is announced.
        is_partial: whether what does not come is declared still right.
        names: that are announced; None if none are.
        digest: of their layout (`layout_digest`).
    """

    id: str
    version: str | None = None
    wants_all: bool = False
    is_partial: bool = False
    names: tuple[str, ...] | None = None
    digest: str | None = None

    def to_text(self) -> str:
        """For the field `rid`."""
        content: dict[str, Any] = {"id": self.id}
        if self.version is not None:
            content["version"] = self.version
        if self.names is not None:
            listed: dict[str, Any] = {"names": list(self.names), "partial": self.is_partial}
            content["extent"] = listed | ({"digest": self.digest} if self.digest else {})
        elif self.wants_all or self.is_partial:
            content["extent"] = ALL if self.wants_all else PARTIAL
        return json.dumps({KEY: content}, separators=(",", ":"))


def note_of(rid: Any) -> RefitNote | None:
    """The note in a request's `rid`; None if it is anything else.

    Raises:
        RefitError: it is a note that can't be read.
    """
    if not isinstance(rid, str) or not rid.lstrip().startswith("{") or KEY not in rid:
        return None
    try:
        content = json.loads(rid)[KEY]
        extent = content.get("extent")
        listed = extent if isinstance(extent, dict) else {}
        names = tuple(map(_text, listed["names"])) if listed else None
        if not listed and extent not in (None, ALL, PARTIAL):
            raise ValueError(f"extent {extent!r}")
        return RefitNote(
            id=_text(content["id"]),
            version=None if content.get("version") is None else _text(content["version"]),
            wants_all=extent == ALL,
            is_partial=extent == PARTIAL or bool(listed.get("partial")),
            names=names,
            digest=None if listed.get("digest") is None else _text(listed["digest"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefitError(
            f"rid {rid[:80]!r}",
            f"{type(error).__name__}: {error}",
            f"a note is {{{KEY!r}: {{'id': text, 'version': text, 'extent': 'all', 'partial' or "
            "{'names': […]}}}",
            "docs/reliability.md has its format; nothing of this request was looked at.",
        ) from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def layout_digest(tensors: Iterable[tuple[str, Any, Sequence[int]]]) -> str:
    """One number for names, dtypes and shapes, whatever their order and their buckets.

    Args:
        tensors: `(name, dtype, shape)`; a packed pair is its two tensors.
    """
    return digest_text(sum(layout_number(*one) for one in tensors))


def layout_number(name: str, dtype: Any, shape: Sequence[int]) -> int:
    """Of one tensor; those of a bucket are added up."""
    line = f"{name}\0{str(dtype).removeprefix('torch.')}\0{list(shape)}"
    return int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest(), "little")


def digest_text(number: int) -> str:
    """The sum of `layout_number`s as it is sent."""
    return f"{number & _MASK:016x}"
