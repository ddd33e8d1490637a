"""What a client says of its refit: one JSON object in the field `rid` of its requests.

SGLang hands `rid` on unread, over HTTP and in every request class of every supported version, so a note
needs no endpoint of its own. docs/reliability.md has the format.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..errors import RefitError

KEY = "fp8rl_refit"
ALL, PARTIAL = "all", "partial"


@dataclass(frozen=True)
class RefitNote:
    """Which refit a request belongs to, and what that refit brings.

    Attributes:
        id: any text; the same for all requests of one refit.
        version: of the weights.
        wants_all: whether every parameter is announced.
        is_partial: whether what does not come is declared still right.
    """

    id: str
    version: str | None = None
    wants_all: bool = False
    is_partial: bool = False

    def to_text(self) -> str:
        """For the field `rid`."""
        content: dict[str, Any] = {"id": self.id}
        if self.version is not None:
            content["version"] = self.version
        if self.wants_all or self.is_partial:
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
        if extent not in (None, ALL, PARTIAL):
            raise ValueError(f"extent {extent!r}")
        return RefitNote(
            id=_text(content["id"]),
            version=None if content.get("version") is None else _text(content["version"]),
            wants_all=extent == ALL,
            is_partial=extent == PARTIAL,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RefitError(
            f"rid {rid[:80]!r}",
            f"{type(error).__name__}: {error}",
            f"a note is {{{KEY!r}: {{'id': text, 'version': text, 'extent': 'all' or 'partial'}}}}",
            "docs/reliability.md has its format; nothing of this request was looked at.",
        ) from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    value.encode()  # what can't be is no text either, and no status could say it
    return value
