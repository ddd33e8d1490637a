"""Does the archive start on a host? It is installed into an environment like one, and imported there.

A host has more than torch: what it has of SciPy and the like is imported by `transformers`, and then meets the
bundle's NumPy. So the environment has the packages that broke it once, in their newest versions. It has no GPU:
`imports_of_a_host.py` tells torch of one, and a `libcuda` without devices stands in for the driver.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from .errors import BundleError
from .wheel_tags import HOST_PYTHON

IMPORTS = Path(__file__).with_name("imports_of_a_host.py")
# What hosts had, and `transformers` imports where it finds it.
_BESIDE_TORCH = ("scipy", "scikit-learn", "accelerate", "pandas")
_DRIVER = "libcuda.so.1"


def make_host(uv: Path, scratch: Path) -> Path:
    """The environment of a host, in a folder of its own. Raises `BundleError` where this machine can't check on one."""
    host, version = scratch / "host", ".".join(map(str, HOST_PYTHON))
    _run([str(uv), "venv", "--quiet", "--python", version, str(host)])
    for program in ("gcc", "nm"):
        _run([program, "--version"])
    return host


def check_on_a_host(
    uv: Path, host: Path, archive: Path, pins: Mapping[str, str], scratch: Path
) -> list[str]:
    """Install `archive` beside torch and more, and import what a server and a client import.

    Args:
        uv: installs with whatever index it is configured with.
        host: as `make_host` made it.
        pins: of torch and Triton.
        scratch: a folder of its own; takes 7 GB that uv links from its cache.

    Returns:
        the names of all that was imported.

    Raises:
        BundleError: something was not; names each with its error.
    """
    folder, unpacked = (scratch / name for name in ("offline", "unpacked"))
    python = str(host / "bin" / "python")
    torch = [f"{name}=={pins[name]}" for name in ("torch", "triton")]
    _run([str(uv), "pip", "install", "--quiet", "--python", python, *torch, *_BESIDE_TORCH])
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    _run([python, str(unpacked / "install.py"), str(folder)])
    driver = _make_driver(folder / "site-packages", scratch / "driver")
    path = os.pathsep.join(filter(None, [str(driver), os.environ.get("LD_LIBRARY_PATH")]))
    said = _run([str(folder / "bin" / "python"), str(IMPORTS)], LD_LIBRARY_PATH=path)
    found: dict[str, str] = json.loads(said.splitlines()[-1])
    failed = {name: error for name, error in found.items() if error}
    if failed:
        raise BundleError(
            "imports on a host", failed, "a server and a client start", "Adapt the recipe."
        )
    return list(found)


def _make_driver(packages: Path, folder: Path) -> Path:
    """A folder with a driver that has every function `packages` link, each of which says that there is no device."""
    folder.mkdir()
    libraries = [str(path) for path in packages.rglob("*.so*")]
    wanted = _run(["nm", "--dynamic", "--undefined-only", "--quiet", *libraries])
    functions = sorted(set(re.findall(r" U (cu[A-Z]\w*)$", wanted, re.MULTILINE)))
    source = folder / "driver.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in functions))
    options = ["-shared", f"-Wl,-soname,{_DRIVER}", "-o", str(folder / _DRIVER)]
    _run(["gcc", str(source), *options])
    return folder


def _run(command: list[str], **environment: str) -> str:
    """What it prints; it runs outside of the checkout, which would come before the bundle's packages."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, cwd="/", env={**os.environ, **environment}
        )
        found = (result.stderr or result.stdout).strip()[-2000:] if result.returncode else None
    except OSError as error:
        found = str(error)
    if found is not None:
        raise BundleError(
            " ".join(command[:3]),
            found,
            "the check of a host runs it",
            f"It needs Python {'.'.join(map(str, HOST_PYTHON))}, gcc, binutils, and torch from an index; --no-check "
            "leaves it out.",
        )
    return result.stdout
