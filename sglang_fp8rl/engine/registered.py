"""What a server does beside serving: one line each. Without the line, and its folder, the rest serves on."""

from __future__ import annotations

import functools
from importlib import import_module

from .extension import Extension

_EXTENSIONS = (
    "proof.extension:Fingerprints",
    "kv_scales.extension:KvScaling",
)


@functools.cache
def extensions() -> tuple[type[Extension], ...]:
    """By name, at the first model or route: nothing that serves imports them."""
    found = (path.split(":") for path in _EXTENSIONS)
    return tuple(getattr(import_module(f".{module}", __package__), name) for module, name in found)
