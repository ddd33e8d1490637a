"""Wheels of the host's interpreter, unpacked into a folder by uv with the user's configuration."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import BundleError
from .pins import canonical
from .records import read_record
from .wheel_tags import HOST_GLIBC, HOST_PYTHON, fits_host, wheel_file_tags

PLUGIN_SOURCES = ("sglang_fp8rl", "pyproject.toml", "README.md", "LICENSE")


def unpack_wheels(uv: Path, python: Path, requirements: Sequence[str], target: Path) -> None:
    """Download `requirements` (each `name==version`) without their dependencies, into `target`.

    Wheels only, for the host's Python and glibc. Whatever index, mirror or cache uv and pip are
    configured with is used.
    """
    version = ".".join(map(str, HOST_PYTHON))
    glibc = "_".join(map(str, HOST_GLIBC))
    _install(
        [
            *(str(uv), "pip", "install", "--quiet", "--no-progress", "--no-deps"),
            *("--only-binary", ":all:", "--python", str(python)),
            *("--python-version", version, "--python-platform", f"x86_64-manylinux_{glibc}"),
            *("--target", str(target), *requirements),
        ]
    )


def unpack_plugin(uv: Path, python: Path, repository: Path, target: Path, scratch: Path) -> None:
    """Build this repository's wheel from a copy of its sources, and unpack it into `target`."""
    for name in PLUGIN_SOURCES:
        source = repository / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, scratch / name, ignore=ignore)
        else:
            shutil.copy2(source, scratch / name)
    version = ".".join(map(str, HOST_PYTHON))
    _install(
        [
            *(str(uv), "pip", "install", "--quiet", "--no-progress", "--no-deps"),
            *("--no-build-isolation", "--python", str(python), "--python-version", version),
            *("--target", str(target), str(scratch)),
        ]
    )


def copy_stand_ins(source: Path, target: Path) -> list[str]:
    """Modules in the place of packages that were left out; their paths, relative to `target`.

    Raises:
        BundleError: the package is there too.
    """
    names = sorted(path.name for path in source.glob("*.py"))
    for name in names:
        if (target / name).exists() or (target / Path(name).stem).exists():
            raise BundleError("stand-in", name, "its package was unpacked too", "Leave one out.")
        shutil.copy2(source / name, target / name)
    return names


@dataclass(frozen=True)
class Edit:
    """In the file `path` of a distribution, `old` is replaced by `new`."""

    path: str
    old: str
    new: str


def apply_edits(edits: Iterable[Edit], target: Path) -> None:
    """Write each edited file anew: what is unpacked may be linked to a cache.

    Raises:
        BundleError: the text is not there exactly once: the edit was written for another version.
    """
    for edit in edits:
        path = target / edit.path
        text = path.read_text()
        if text.count(edit.old) != 1:
            raise BundleError(
                edit.path, edit.old, "an edit's text stands there once", "Adapt the recipe."
            )
        path.unlink()
        path.write_text(text.replace(edit.old, edit.new))


def distributions(target: Path) -> dict[str, Path]:
    """Canonical name → its dist-info folder, for all that is unpacked in `target`."""
    return {
        canonical(info.name.removesuffix(".dist-info").rsplit("-", 1)[0]): info
        for info in sorted(target.glob("*.dist-info"))
    }


def check_tags(found: dict[str, Path]) -> None:
    """Raise a BundleError that names each distribution whose wheel is not one for the host."""
    wrong = {
        name: tags
        for name, info in found.items()
        if not fits_host(tags := wheel_file_tags((info / "WHEEL").read_text()))
    }
    if wrong:
        raise BundleError("wheels", wrong, "not for the host's interpreter", "Pin another build.")


def recorded_files(info: Path, target: Path) -> list[str]:
    """Paths (posix, relative to `target`) of one distribution, as its RECORD lists them."""
    paths = read_record(info)
    missing = [path for path in paths if not (target / path).is_file()]
    if missing:
        raise BundleError(info.name, missing[:3], "in RECORD and not on disk", "Stage it again.")
    return paths


def _install(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BundleError(
            " ".join(command[1:3]),
            result.stderr.strip(),
            "uv could not unpack the wheels",
            "It needs the network, or a configured mirror, on the machine that builds.",
        )
