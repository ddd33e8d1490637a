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
    handle stays as it is; so does one whose dynamic section would change.
    """
    strip, readelf = _tool("strip"), _tool("readelf")
    for path in paths:
        before = path.stat().st_size
        stripped = path.with_name(path.name + ".stripped")
        done = subprocess.run([strip, "--strip-all", "-o", stripped, path], capture_output=True)
        if done.returncode == 0 and _dynamic(readelf, path) == _dynamic(readelf, stripped):
            shutil.copymode(path, stripped)
            os.replace(stripped, path)
        stripped.unlink(missing_ok=True)
        yield before - path.stat().st_size


def _dynamic(readelf: str, path: Path) -> list[str]:
    """Needed libraries, run paths and dynamic symbols by name: what the loader goes by."""
    shown = [
        subprocess.run([readelf, "-W", flag, path], capture_output=True, text=True).stdout
        for flag in ("-d", "--dyn-syms")
    ]
    needed = [line for line in shown[0].splitlines() if "[" in line]
    # A symbol's section index and value may move; its name and binding may not.
    return needed + [
        " ".join(line.split()[3:6] + line.split()[7:]) for line in shown[1].splitlines()
    ]


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise BundleError(name, "not found", "binutils strips the libraries", "Install binutils.")
    return found
