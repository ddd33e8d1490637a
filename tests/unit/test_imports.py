"""The trainer side needs torch only: checked by importing it in a fresh interpreter."""

import json
import subprocess
import sys

import pytest

TRAINER_SIDE = ["sglang_fp8rl", "sglang_fp8rl.numerics", "sglang_fp8rl.trainer"]


def modules_after_importing(name: str) -> set[str]:
    code = f"import json, sys, pkgutil, importlib\nm = importlib.import_module({name!r})\n"
    if name != "sglang_fp8rl":
        code += (
            "for _, child, _ in pkgutil.walk_packages(m.__path__, m.__name__ + '.'):\n"
            "    if 'triton' not in child: importlib.import_module(child)\n"
        )
    code += "print(json.dumps([name.split('.')[0] for name in sys.modules]))"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return set(json.loads(output.splitlines()[-1]))


@pytest.mark.parametrize("name", TRAINER_SIDE)
def test_the_trainer_side_never_imports_sglang(name):
    loaded = modules_after_importing(name)
    assert not loaded & {"sglang", "transformers", "verl", "sgl_kernel", "flashinfer"}


def test_the_package_itself_imports_neither_torch_nor_sglang_nor_its_command_line():
    loaded = modules_after_importing("sglang_fp8rl")
    assert not loaded & {"torch", "sglang", "typer", "rich"}
