"""The exact versions of a constraints file."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import BundleError

_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;#]+)")


def canonical(name: str) -> str:
    """The name under which distributions are compared: lower case, one dash for any separator."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path) -> dict[str, str]:
    """Canonical name → version, of every line of `path`.

    Raises:
        BundleError: a line that is neither empty, a comment, nor `name==version`; a name twice.
    """
    pins: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        match = _PIN.fullmatch(text)
        if match is None:
            raise BundleError(f"{path.name}:{number}", text, "not an exact pin", "name==version")
        name = canonical(match["name"])
        if name in pins:
            raise BundleError(f"{path.name}:{number}", text, f"{name} is pinned twice", "keep one")
        pins[name] = match["version"]
    return pins
