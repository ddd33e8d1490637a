"""What importing a part imports: looked at in one fresh interpreter, part after part."""

import json
import subprocess
import sys

import pytest

PARTS = {
    "the package itself": "import sglang_fp8rl",
    "torch": "import torch",
    "the casts": "import sglang_fp8rl.numerics",
    "the metrics": "import sglang_fp8rl.lab.metrics",
    "the casts, all modules": "walk('sglang_fp8rl.numerics')",
    "the trainer, all modules": "walk('sglang_fp8rl.trainer')",
    "the plan": "sglang_fp8rl.fetch_plan, sglang_fp8rl.RefitPlan",
}
CODE = """
import importlib, json, pkgutil, sys
def walk(name):
    package = importlib.import_module(name)
    for _, child, _ in pkgutil.walk_packages(package.__path__, name + "."):
        if "triton" not in child: importlib.import_module(child)
loaded = {}
for part, statement in json.loads(sys.argv[1]).items():
    before = set(sys.modules)
    exec(statement)
    loaded[part] = sorted({name.split(".")[0] for name in set(sys.modules) - before})
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def loaded():
    """Each part's new modules, by the name of their package."""
    command = [sys.executable, "-c", CODE, json.dumps(PARTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert "sglang_fp8rl" in found["the package itself"]
    return found


@pytest.mark.parametrize("part", [part for part in PARTS if part != "torch"])
def test_what_runs_beside_a_trainer_never_imports_sglang(loaded, part):
    assert not {"sglang", "transformers", "verl", "sgl_kernel", "flashinfer"} & set(loaded[part])


def test_the_package_itself_imports_neither_torch_nor_its_command_line(loaded):
    assert not {"torch", "typer", "rich"} & set(loaded["the package itself"])


def test_importing_the_casts_needs_neither_numba_nor_triton(loaded):
    assert not {"numba", "llvmlite", "triton"} & set(loaded["the casts"])


def test_the_metrics_need_torch_only(loaded):
    assert not {"scipy", "requests"} & set(loaded["the metrics"])
