"""One reproducible archive: the same files give the same bytes, whenever and wherever built."""

from __future__ import annotations

import hashlib
import io
import lzma
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

DICTIONARY = 192 << 20  # bytes of LZMA history: duplicates are found across distributions
EXECUTABLE, PLAIN = 0o755, 0o644


def by_kind(path: str) -> tuple[str, str, str]:
    """Sort key: alike next to alike, as a compressor wants it."""
    pure = Path(path)
    return pure.suffix, pure.name, path


def write_xz_tar(
    archive: Path,
    root: Path,
    paths: Iterable[str],
    *,
    native: bool,
    level: int = 6,
    on_bytes: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """`paths` below `root` as a tar in xz, in the order given. The host reads it with its stdlib.

    Args:
        native: of machine code: the x86 filter turns relative jumps into absolute ones first.
        level: preset of xz, 0 to 9; its history is `DICTIONARY` whatever the level.
        on_bytes: called with the bytes so far, for a progress bar.
    """
    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": level, "dict_size": DICTIONARY}
    filters = [{"id": lzma.FILTER_X86}, lzma2] if native else [lzma2]
    with (
        lzma.open(archive, "wb", format=lzma.FORMAT_XZ, filters=filters) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as tar,
    ):
        nbytes = 0
        for path in paths:
            _add(tar, path, root / path)
            nbytes += (root / path).stat().st_size
            on_bytes(nbytes)


def write_tar(archive: Path, files: Iterable[tuple[str, Path]]) -> None:
    """The outer archive: what is in it is compressed already. `files`: name inside, file."""
    with tarfile.open(archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, path in files:
            _add(tar, name, path)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _add(tar: tarfile.TarFile, name: str, path: Path) -> None:
    info = tarfile.TarInfo(name)
    info.size = path.stat().st_size
    info.mode = EXECUTABLE if path.stat().st_mode & 0o100 else PLAIN
    with path.open("rb") as file:
        tar.addfile(info, file if info.size else io.BytesIO())
