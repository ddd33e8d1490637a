"""Symbol tables out of shared objects: hundreds of megabytes that nothing reads at run time."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import BundleError

_MAGIC = b"\x7fELF"


def is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


def strip_symbols(paths: Iterable[Path]) -> Iterator[int]:
    """Strip each ELF file, yielding the bytes won. Dynamic symbols stay.

    A file is replaced, never written through: uv links it to its cache. One that binutils can't
    handle, or would hand back changed for the loader, stays as it is.
    """
    strip, readelf = _tool("strip"), _tool("readelf")
    for path in paths:
        before = path.stat().st_size
        stripped = path.with_name(path.name + ".stripped")
        done = subprocess.run([strip, "--strip-all", "-o", stripped, path], capture_output=True)
        if done.returncode == 0 and _loads_alike(readelf, path, stripped):
            shutil.copymode(path, stripped)
            os.replace(stripped, path)
        stripped.unlink(missing_ok=True)
        yield before - path.stat().st_size


def unloadable_segments(shown: str) -> list[str]:
    """LOAD lines of `readelf -lW` that the loader refuses: offset and address differ in a page.

    That is what `strip` makes of libraries whose dynamic section was moved by patchelf, as
    auditwheel does (numpy's OpenBLAS is one).
    """
    segments = [line.split() for line in shown.splitlines() if line.split()[:1] == ["LOAD"]]
    return [
        " ".join(words)
        for words in segments
        if (int(words[1], 16) - int(words[2], 16)) % int(words[-1], 16)
    ]


def _loads_alike(readelf: str, path: Path, stripped: Path) -> bool:
    segments = _shown(readelf, "--program-headers", stripped)
    return not unloadable_segments(segments) and _dynamic(readelf, path) == _dynamic(
        readelf, stripped
    )


def _dynamic(readelf: str, path: Path) -> list[str]:
    """Needed libraries, run paths and dynamic symbols by name: what the loader goes by."""
    needed = [line for line in _shown(readelf, "--dynamic", path).splitlines() if "[" in line]
    symbols = _shown(readelf, "--dyn-syms", path).splitlines()
    # A symbol's section index may move; its type, binding, visibility and name may not.
    return needed + [" ".join(line.split()[3:6] + line.split()[7:]) for line in symbols]


def _shown(readelf: str, flag: str, path: Path) -> str:
    return subprocess.run([readelf, "--wide", flag, path], capture_output=True, text=True).stdout


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise BundleError(name, "not found", "binutils strips the libraries", "Install binutils.")
    return found
