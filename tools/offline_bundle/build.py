"""The steps of a build, in order: stage, check, select, strip, compress, measure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from sglang_fp8rl.lab.demo.show import Screen

from . import archive, elf, recipe, staging
from .errors import BundleError
from .host_check import check_on_a_host, make_host
from .pins import read_pins
from .records import DROPPED_METADATA, shrink_record
from .selection import Drop, select, undecided
from .wheel_tags import HOST_GLIBC, HOST_PYTHON

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
CONSTRAINTS = REPOSITORY / "constraints" / "oldest.txt"
PYTHON_PART, NATIVE_PART = "python.tar.xz", "native.tar.xz"
MIB = 1 << 20


@dataclass
class Built:
    """What was built. Sizes in bytes; `taken` per distribution, `dropped` per rule of the recipe; `imported` on a host."""

    archive: Path
    nbytes: int
    sha256: str
    taken: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    stripped: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    files: int = 0
    imported: int = 0


@dataclass(frozen=True)
class BuildOptions:
    """`uv`, `python`: programs to stage with. `scratch`: an empty folder. `output`: for the archive.
    `is_checked`: whether it is installed into an environment like a host, and imported there."""

    uv: Path
    python: Path
    scratch: Path
    output: Path
    max_mib: float
    level: int
    is_checked: bool = True


def build(options: BuildOptions, screen: Screen) -> Built:
    """Build the archive.

    Raises:
        BundleError: the recipe does not fit the pins, a wheel is not for the host, or the archive
            is over its limit, or does not start on a host (it stays in `output` for a look); or this machine
            can't check that, which is said before anything is built.
    """
    host = make_host(options.uv, options.scratch) if options.is_checked else None
    pins = read_pins(CONSTRAINTS) | recipe.UNCONSTRAINED
    if open_questions := undecided(pins, recipe.TAKEN, recipe.LEFT_OUT):
        raise BundleError("recipe", open_questions, "every pin is taken or left out", "Decide.")
    site = options.scratch / "site-packages"
    with screen.step(f"unpacking {len(recipe.TAKEN)} wheels of SGLang {recipe.SGLANG}"):
        requirements = recipe.pinned(recipe.TAKEN, pins)
        staging.unpack_wheels(options.uv, options.python, requirements, site)
    with screen.step("building this plugin's wheel"):
        source = options.scratch / "plugin"
        source.mkdir()
        staging.unpack_plugin(options.uv, options.python, REPOSITORY, site, source)
    found = staging.distributions(site)
    staging.check_tags(found)
    if missing := sorted({*recipe.TAKEN, recipe.PLUGIN} - set(found)):
        raise BundleError("staging", missing, "not unpacked", "Stage it again.")

    kept, dropped = _select(found, site)
    staging.apply_edits(recipe.EDITS, site)
    stand_ins = staging.copy_stand_ins(HERE / "stand_ins", site)
    paths = [*(path for files in kept.values() for path in files), *stand_ins]
    native = [path for path in paths if elf.is_elf(site / path)]
    with screen.step(f"stripping {len(native)} libraries"):
        won = sum(elf.strip_symbols(site / path for path in native))

    output = options.output / f"sglang-{recipe.SGLANG}-offline-cp312-linux_x86_64.tar"
    options.output.mkdir(parents=True, exist_ok=True)
    parts = _compress(options, screen, site, sorted(set(paths) - set(native)), native)
    manifest = options.scratch / "manifest.json"
    manifest.write_text(_manifest(pins, parts))
    archive.write_tar(output, [*_host_files(), ("manifest.json", manifest), *parts.items()])
    built = Built(
        archive=output,
        nbytes=output.stat().st_size,
        sha256=archive.sha256(output),
        taken={name: _size(site, files) for name, files in kept.items()},
        dropped=dropped,
        stripped=won,
        parts={name: part.stat().st_size for name, part in parts.items()},
        files=len(paths),
    )
    if built.nbytes > options.max_mib * MIB:
        raise BundleError(
            str(output.name),
            f"{built.nbytes / MIB:.1f} MiB",
            f"at most {options.max_mib:g} MiB",
            "Leave out more in recipe.py.",
        )
    if host is not None:
        with screen.step("importing all of it on a host (torch from the index: minutes)"):
            found = check_on_a_host(options.uv, host, output, pins, options.scratch)
            built.imported = len(found)
    return built


def _select(found: dict[str, Path], site: Path) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Files kept of each distribution, and bytes dropped by each reason; RECORDs follow."""
    kept: dict[str, list[str]] = {}
    dropped: dict[str, int] = {}
    drops = (*recipe.DROPS, *(Drop("*", f"*.dist-info/{name}", "") for name in DROPPED_METADATA))
    for name, info in found.items():
        files = staging.recorded_files(info, site)
        chosen = select(name, files, drops, recipe.KEEP.get(name, ()))
        for path, rule in chosen.dropped.items():
            if rule.why:
                key = f"{name}: {rule.why}" if rule.distribution != "*" else rule.why
                dropped[key] = dropped.get(key, 0) + (site / path).stat().st_size
        shrink_record(info, chosen.kept)
        kept[name] = chosen.kept
    return kept, dropped


def _compress(
    options: BuildOptions, screen: Screen, site: Path, text: list[str], native: list[str]
) -> dict[str, Path]:
    parts = {}
    for name, files, is_native in ((PYTHON_PART, text, False), (NATIVE_PART, native, True)):
        part = options.scratch / name
        ordered = sorted(files, key=archive.by_kind)
        with screen.step(f"compressing {name}", nbytes=_size(site, ordered)) as moved:
            archive.write_xz_tar(
                part, site, ordered, native=is_native, level=options.level, on_bytes=moved
            )
        parts[name] = part
    return parts


def _manifest(pins: dict[str, str], parts: dict[str, Path]) -> str:
    host = {
        "python": ".".join(map(str, HOST_PYTHON)),
        "glibc": ".".join(map(str, HOST_GLIBC)),
        "torch": pins["torch"].rsplit(".", 1)[0] + ".",
        "triton": pins["triton"].rsplit(".", 1)[0] + ".",
        "cuda": "13",
    }
    versions = {name: pins[name] for name in sorted(recipe.TAKEN)}
    digests = {name: archive.sha256(part) for name, part in parts.items()}
    return json.dumps({"host": host, "parts": digests, "versions": versions}, indent=1) + "\n"


def _host_files() -> list[tuple[str, Path]]:
    host = HERE / "host"
    return [
        (path.relative_to(host).as_posix(), path)
        for path in sorted(host.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    ]


def _size(site: Path, files: list[str]) -> int:
    return sum((site / path).stat().st_size for path in files)
