"""What is built from a checkout: a wheel and an sdist that install, start, and need no extra of the lab's."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""
# As in an environment without the extra `lab`.
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({missing}))
import sglang_fp8rl, sglang_fp8rl.trainer.served_weights, sglang_fp8rl.client
from importlib.metadata import entry_points
(command,) = entry_points(group="console_scripts", name="sglang-fp8rl")
command.load()(["--version"])
"""


def run(*command: object, folder: Path) -> str:
    command = tuple(map(str, command))
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def built(kind: str, checkout: Path, out: Path) -> Path:
    """What the build backend makes of a checkout, by this environment's setuptools."""
    return out / run(sys.executable, "-c", BUILD, kind, out, folder=checkout).splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    checkout = tmp_path_factory.mktemp("checkout") / "of"
    for name in ("sglang_fp8rl", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    return built("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Of the sdist, so that this has all that a build needs."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (checkout,) = unpacked.iterdir()
    return built("wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment of its own with the wheel alone; other packages are the tests' own."""
    where = tmp_path_factory.mktemp("environment")
    venv.create(where, with_pip=True)
    install = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
    run(where / "bin/python", *install, folder=where)
    (site,) = where.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return where


def test_a_wheel_has_the_package_with_all_its_files_and_nothing_else(wheel):
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "sglang_fp8rl").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == files


def test_it_requires_what_serving_does_and_the_lab_s_packages_under_their_extra(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    required = re.findall(r"^Requires-Dist: (.+)$", archive.read(name).decode(), re.MULTILINE)
    assert {one for one in required if "extra ==" not in one} == set(PROJECT["dependencies"])
    extras = {one.partition(";")[2].strip() for one in required} - {""}
    assert extras == {f'extra == "{extra}"' for extra in PROJECT["optional-dependencies"]}


# What runs beside a trainer, or before SGLang is there.
WITHOUT_SGLANG = [
    *("client/*.py", "trainer/*.py", "wire/*.py", "numerics/**/*.py", "*.py"),
    *(f"lab/{name}.py" for name in ("cli", "commands", "terminal", "doctor", "host_symbols")),
]
# Faster casts, which fall back to torch; what names of models and of classes need; the trainer itself.
OPTIONAL = {"numba", "llvmlite", "triton", "transformers", "huggingface_hub", "sglang", "verl"}


def test_what_runs_without_sglang_imports_only_what_is_required():
    required = {re.split("[<>=]", one)[0] for one in PROJECT["dependencies"]}
    allowed = required | OPTIONAL | sys.stdlib_module_names | {"sglang_fp8rl"}
    package = ROOT / "sglang_fp8rl"
    files = {path for pattern in WITHOUT_SGLANG for path in package.glob(pattern)}
    found = {name: path.name for path in files for name in imported(path) if name not in allowed}
    assert found == {}


def imported(path: Path) -> set[str]:
    """The packages that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


@pytest.mark.slow
def test_an_installed_wheel_is_what_starts(installed):
    version = run(installed / "bin/sglang-fp8rl", "--version", folder=installed)
    assert version.strip() == PROJECT["version"]
    code = "import sglang_fp8rl; print(sglang_fp8rl.__file__)"
    assert run(installed / "bin/python", "-c", code, folder=installed).startswith(str(installed))


@pytest.mark.slow
def test_it_starts_without_the_lab_s_packages(installed):
    extra = PROJECT["optional-dependencies"]["lab"]
    missing = [re.split("[<>=]", one)[0].replace("-", "_") for one in extra]
    code = WITHOUT.format(missing=missing)
    said = run(installed / "bin/python", "-c", code, folder=installed)
    assert said.strip() == PROJECT["version"]


@pytest.mark.slow
def test_its_doctor_says_that_this_sglang_fits(installed):
    pytest.importorskip("sglang")
    assert "tested" in run(installed / "bin/sglang-fp8rl", "doctor", folder=installed)
