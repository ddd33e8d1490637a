"""The model classes of SGLang's registry, and those that it could not import."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

from sglang_fp8rl.errors import ConfigError


def architectures() -> list[str]:
    """Every class that a file of `sglang.srt.models` offers, by name; SGLang is not imported."""
    found = (name for path in _files() for name in _entries(path))
    return sorted(set(found))


def matching(pattern: str) -> list[str]:
    """Those in whose names a regular expression is found. Raises `ConfigError` where it is none, or in no name."""
    try:
        found = [one for one in architectures() if re.search(pattern, one)]
    except re.error as error:
        rule = "it has to be a regular expression"
        raise ConfigError("--only", f"{pattern!r}: {error}", rule, "Correct it.") from error
    if not found:
        rule = "it has to be found in the name of a class that SGLang has"
        raise ConfigError("--only", repr(pattern), rule, "Nothing was judged; give another one.")
    return found


def why_missing(architecture: str) -> str:
    """Why a class is not in the registry: SGLang goes on without the files that it can't import."""
    import importlib

    for path in _files():
        if architecture in _entries(path):
            try:
                importlib.import_module(f"sglang.srt.models.{path.stem}")
            except Exception as error:  # noqa: BLE001  it is the answer
                return f"{type(error).__name__}: {str(error).partition(' (/')[0]}"  # no path of this machine
    return "SGLang leaves it out of its registry"


def _files() -> Iterator[Path]:
    import importlib.util

    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "srt" / "models"
    for module in pkgutil.iter_modules([str(folder)]):
        path = folder / f"{module.name}.py"
        if path.exists():
            yield path


def _entries(path: Path) -> list[str]:
    for node in ast.parse(path.read_bytes()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == "EntryClass" for one in targets):
            value = node.value  # type: ignore[attr-defined]
            names = value.elts if isinstance(value, ast.List) else [value]
            return [one.id for one in names if isinstance(one, ast.Name)]
    return []
