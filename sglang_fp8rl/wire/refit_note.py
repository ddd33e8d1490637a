"""What a client says of its refit: one JSON object in the field `rid` of its requests.

SGLang hands `rid` on unread, over HTTP and in every request class of every supported version, so a note
needs no endpoint of its own. docs/reliability.md has the format.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import RefitError

KEY = "fp8rl_refit"
_SAID = re.compile("\x1ffp8rl-version:(.*?)\x1f")  # JSON has no such character within
ALL, PARTIAL = "all", "partial"


@dataclass(frozen=True)
class RefitNote:
    """Which refit a request belongs to, and what that refit brings."""

    id: str  # any text; the same for all requests of one refit
    version: str | None = None  # of the weights
    # `all` parameters are announced, or it is `partial`: what does not come is declared still right.
    extent: str | None = None

    def __post_init__(self) -> None:
        if self.extent not in (None, ALL, PARTIAL):
            raise ValueError(f"extent {self.extent!r}")
        texts = [self.id] if self.version is None else [self.id, self.version]
        for text in texts:
            if not isinstance(text, str):
                rule = "the id of a refit and the version of its weights are text"
                raise RefitError("a refit", repr(text), rule, "Pass weight_version=str(step).")
        "".join(texts).encode()  # what can't be is no text either, and no status could say it

    def to_text(self) -> str:
        """For the field `rid`."""
        content = {key: value for key, value in asdict(self).items() if value is not None}
        return json.dumps({KEY: content}, separators=(",", ":"))


def note_of(rid: Any) -> RefitNote | None:
    """The note in a request's `rid`; None if it is anything else. Raises `RefitError` for one that can't be read."""
    if not isinstance(rid, str) or not rid.lstrip().startswith("{") or KEY not in rid:
        return None
    try:
        content = json.loads(rid)[KEY]
        if unread := content.keys() - {"id", "version", "extent"}:
            raise ValueError(f"nobody reads {sorted(unread)}")
        return RefitNote(content["id"], content.get("version"), content.get("extent"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RefitError(
            f"rid {rid[:80]!r}",
            f"{type(error).__name__}: {error}",
            f"a note is {{{KEY!r}: {{'id': text, 'version': text, 'extent': 'all' or 'partial'}}}}",
            "docs/reliability.md has its format; nothing of this request was looked at.",
        ) from error


def with_version(text: str | None, version: str | None) -> str:
    """A request's `rid`, or an answer's message, that says beside all else what weights are called from now on; None if
    that does not change."""
    return f"{text or ''}\x1ffp8rl-version:{json.dumps(version)}\x1f"


def apart_from_versions(text: Any) -> tuple[Any, list[str | None]]:
    """Such a text as it was, and the versions that it says: of an answer, one of each replica."""
    if not isinstance(text, str):
        return text, []
    return without_versions(text), [json.loads(one) for one in _SAID.findall(text)]


def without_versions(text: str) -> str:
    """A text of somebody else, without what looks as if it said a version: the name of a tensor may."""
    return _SAID.sub("", text)
