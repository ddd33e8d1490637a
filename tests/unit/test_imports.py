"""What importing a part imports: looked at in one fresh interpreter, part after part."""

import json

import pytest
from support.python import printed_by

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
    exec(statement)
    loaded[part] = sorted(sys.modules)
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def loaded():
    """What is loaded behind each part: its modules and those of the parts before it."""
    said = json.loads(printed_by(CODE, json.dumps(PARTS)).splitlines()[-1])
    found = {part: set(names) for part, names in said.items()}
    assert "sglang_fp8rl" in found["the package itself"]
    return found


def packages(names):
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("part", PARTS)
def test_what_runs_beside_a_trainer_never_imports_sglang(loaded, part):
    hosts = {"sglang", "transformers", "verl", "sgl_kernel", "flashinfer"}
    assert not hosts & packages(loaded[part])


def test_the_package_itself_imports_neither_torch_nor_its_command_line(loaded):
    assert not {"torch", "typer", "rich"} & packages(loaded["the package itself"])


def test_importing_the_casts_needs_neither_numba_nor_triton(loaded):
    new = loaded["the casts"] - loaded["torch"]
    assert not {"numba", "llvmlite", "triton"} & packages(new)


def test_the_metrics_need_torch_only(loaded):
    assert not {"scipy", "requests"} & packages(loaded["the metrics"])
