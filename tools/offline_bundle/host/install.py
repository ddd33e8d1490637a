#!/usr/bin/env python3
"""Unpack the bundle into a folder, on a host without network. Standard library only.

    python3 install.py [FOLDER]        default: ./sglang-offline

Writes nothing outside FOLDER. Run it with the interpreter that has torch: the folder's `bin/python`
starts that one, with the bundle's packages in front of the host's.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import importlib.util
import json
import lzma
import os
import re
import stat
import sys
import tarfile
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "wrappers"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("sglang-offline"))
    parser.add_argument("--force", action="store_true", help="another Python, torch or Triton")
    parser.add_argument("--no-compile", action="store_true", help="no bytecode: a slow first start")
    options = parser.parse_args()
    manifest = json.loads((HERE / "manifest.json").read_text())
    problems = mismatches(manifest["host"])
    for problem in problems:
        print(f"install.py: {problem}", file=sys.stderr)
    if problems and not options.force:
        print("install.py: nothing was written; --force installs all the same", file=sys.stderr)
        return 1
    folder = options.folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        print(f"install.py: {folder}: not empty; name another folder", file=sys.stderr)
        return 2
    for name, digest in manifest["parts"].items():
        if sha256(HERE / name) != digest:
            print(f"install.py: {name}: not as built; copy the archive again", file=sys.stderr)
            return 2
    site = folder / "site-packages"
    site.mkdir(parents=True)
    for name in manifest["parts"]:
        unpack(HERE / name, site)
    if not options.no_compile:
        warnings.simplefilter("ignore")  # of sources that are not ours
        compileall.compile_dir(str(site), quiet=2, workers=os.cpu_count() or 1)
    write_wrappers(folder)
    print(f"{folder}: {sum(1 for _ in site.glob('*.dist-info'))} distributions")
    print(f"  {folder}/bin/sglang-fp8rl doctor")
    print(f"  {folder}/bin/serve --model-path MODEL --quantization fp8_blockwise_online")
    return 0


def mismatches(host: dict[str, str]) -> list[str]:
    """What this host has that the bundle was not made for. Imports nothing: torch takes seconds."""
    problems = []
    if f"{sys.version_info.major}.{sys.version_info.minor}" != host["python"]:
        problems.append(f"Python {sys.version.split()[0]}: the wheels are for {host['python']}")
    for module in ("torch", "triton"):
        found = version_of(module)
        if found is None or not found.startswith(host[module]):
            problems.append(f"{module} {found or 'not installed'}: made for {host[module]}")
    if (cuda := torch_cuda()) is None or cuda.split(".")[0] != host["cuda"]:
        problems.append(f"torch's CUDA {cuda or 'none'}: the kernels are for CUDA {host['cuda']}")
    libc = os.confstr("CS_GNU_LIBC_VERSION").split()[-1]
    if tuple(map(int, libc.split("."))) < tuple(map(int, host["glibc"].split("."))):
        problems.append(f"glibc {libc}: the wheels need {host['glibc']}")
    return problems


def version_of(module: str) -> str | None:
    """Version of an installed distribution, or None."""
    from importlib import metadata

    if importlib.util.find_spec(module) is None:
        return None
    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built with, read from its version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b.*=\s*'([0-9.]+)'", text, re.MULTILINE)
    return found[1] if found else None


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def unpack(part: Path, site: Path) -> None:
    """Extract one part; a member that points outside of `site` is an error of tarfile's filter."""
    with lzma.open(part) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        tar.extractall(site, filter="data")


def write_wrappers(folder: Path) -> None:
    """`bin/`: this interpreter, with the bundle on its path; settings that its contents need."""
    binaries = folder / "bin"
    binaries.mkdir()
    for template in sorted(SCRIPTS.iterdir()):
        text = (
            template.read_text()
            .replace("@PYTHON@", sys.executable)
            .replace("@FOLDER@", str(folder))
        )
        path = binaries / template.name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


if __name__ == "__main__":
    sys.exit(main())
